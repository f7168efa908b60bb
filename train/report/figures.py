"""The pictures of the page: each has one panel, so that it can be read on a phone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.report.arms import Arm
from train.report.plots import (
    LABELS,
    OKABE_ITO,
    add_legend,
    curve_figure,
    lay_out,
    lay_out_log,
    lines_of,
    new_figure,
    wrapped,
)
from train.report.targets import prices
from train.rundir.records import Layers

PHASES = {"plan": "#0072B2", "train": "#E69F00", "aggregate": "#009E73", "evaluate": "#CC79A7", "rest": "#BBBBBB"}
ACCURACIES = {"rounds": "Accuracy by round", "bytes": "Accuracy by bytes", "simulated": "Accuracy by simulated time"}
BAR = 0.45  # height, of 1 from bar to bar


@dataclass(frozen=True)
class Drawing:
    """A picture, and what it shows in words."""

    figure: Figure
    caption: str


def accuracy_drawings(arms: Sequence[Arm], targets: Sequence[float]) -> Iterator[Drawing]:
    """Accuracy against rounds, bytes and, where the runs have a simulated clock, seconds; and the tasks' own."""
    dotted = " Dotted: the targets." if targets else ""
    timed = any("simulated_seconds" in line for arm in arms for line in arm.lines)
    for x, title in ACCURACIES.items():
        if x != "simulated" or timed:
            caption = f"Test accuracy against {LABELS[x]}.{dotted}"
            yield from curve_drawings(arms, "test_accuracy", title, caption, x=x, targets=targets)
    for task in dict.fromkeys(task for arm in arms for task in arm.settings.get("tasks") or {}):
        yield from curve_drawings(arms, f"{task}/test_accuracy", f"Task {task}", f"Test accuracy of {task} by round.")


def curve_drawings(
    arms: Sequence[Arm],
    y: str,
    title: str,
    caption: str,
    x: str = "rounds",
    targets: Sequence[float] = (),
    log: bool = False,
) -> Iterator[Drawing]:
    """One metric of all arms, mean and band over seeds; no picture where no run has it."""
    curves = {arm.label: arm.curves(y, x) for arm in arms}
    values = [point.y for seeds in curves.values() for curve in seeds for point in curve]
    if not values:
        return
    figure = curve_figure(curves, {arm.label: arm.style for arm in arms}, x, y, title, targets)
    axes, usual = figure.axes[0], median(values)
    if log and min(values) > 0:
        lay_out_log(axes, "y")
    elif max(values) > 20 * usual > 0:  # a few huge values would hide all the others
        axes.set_ylim(top=4 * usual)
        caption += " Some of a run that diverged is above the picture."
    yield Drawing(figure, caption)


def law_drawings(laws: Mapping[str, Layers], arms: Sequence[Arm], when: str) -> Iterator[Drawing]:
    """π and ω of up to three layers, one color an arm, for the smallest keep ratio of each.

    Args:
        laws: by the arm's label.
        arms: that are drawn.
        when: they were recorded, in words.
    """
    names = list(dict.fromkeys(name for layers in laws.values() for name in layers))
    for name in dict.fromkeys(names[round(share * (len(names) - 1))] for share in (0, 0.5, 1)):
        for symbol, key, words in (("π", "inclusion", "inclusion probability"), ("ω", "multipliers", "multiplier")):
            figure, axes = new_figure()
            for arm in arms:
                if its := laws.get(arm.label, {}).get(name):
                    law = min(its, key=lambda law: law.keep_ratio)
                    values, label = getattr(law, key), f"{arm.label} (r = {law.keep_ratio:g})"
                    places = range(1, len(values) + 1)
                    axes.plot(places, values, **arm.style.line(len(values)), label=label, drawstyle="steps-mid")
            lay_out(axes, "singular term", f"{symbol}, {words}", f"{symbol} of {name}")
            if symbol == "ω":
                lay_out_log(axes, "y")
            add_legend(figure, axes)
            yield Drawing(figure, f"{symbol} of the terms of {name} {when}, the largest term first.")


def partition_drawings(clients: Mapping[str, Any], name: str) -> Iterator[Drawing]:
    """Who has what: samples of each client, shaded by keep ratio, and its share of every class."""
    samples, ratios = np.array(clients["samples"]), np.array(clients["keep_ratios"])
    figure, axes = new_figure()
    axes.set_axisbelow(True)
    for place, ratio in enumerate(sorted(set(ratios.tolist()))):
        mine = np.flatnonzero(ratios == ratio)
        axes.bar(mine, samples[mine], width=0.9, color=OKABE_ITO[place % len(OKABE_ITO)], label=f"r = {ratio:g}")
    lay_out(axes, "client", "samples", f"{name}\nsamples and keep ratios")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(figure, axes)
    yield Drawing(figure, f"Samples of each of {len(samples)} clients, colored by keep ratio r.")
    if clients["classes"] is not None:
        counts = np.array(clients["classes"])
        figure, axes = new_figure()
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        image = axes.imshow(shares.T, aspect="auto", interpolation="nearest", cmap="cividis", vmin=0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="client", ylabel="class")
        axes.set_title(f"{name}: classes", loc="left")
        figure.colorbar(image, ax=axes, label="share of the client's samples")
        yield Drawing(figure, "Each client's share of every class.")


def phase_drawing(arms: Sequence[Arm]) -> Drawing:
    """Seconds of a round by phase, mean over rounds and seeds."""
    figure, axes = _bars(arms)
    left = np.zeros(len(arms))
    parts = [phases_of(arm) for arm in arms]
    for phase, color in PHASES.items():
        widths = np.array([part[phase] for part in parts])
        axes.barh(range(len(arms)), widths, left=left, color=color, label=phase, height=BAR)
        left += widths
    lay_out(axes, "seconds a round", "", "Phases of time")
    add_legend(figure, axes)
    return Drawing(figure, "Seconds of a round by phase, mean over rounds and seeds.")


def phases_of(arm: Arm) -> dict[str, float]:
    """Return the mean seconds of each phase of a round, and of the rest of it."""
    named = {phase: fmean(line.get(f"seconds_{phase}", 0.0) for line in arm.lines) for phase in PHASES}
    return named | {"rest": max(0.0, fmean(line["seconds"] for line in arm.lines) - sum(named.values()))}


def lost_drawing(arms: Sequence[Arm]) -> Drawing:
    """Client updates left out, summed up over the rounds."""
    figure, axes = new_figure()
    for arm in arms:
        totals = [np.cumsum([line["failed"] for line in run.lines]) for run in arm.runs]
        length = min(map(len, totals))
        average = np.mean([total[:length] for total in totals], axis=0)
        axes.plot(range(1, length + 1), average, **arm.style.line(length), label=arm.label)
    lay_out(axes, "rounds", "client updates left out so far", "Lost clients")
    axes.set_ylim(bottom=0)
    add_legend(figure, axes)
    return Drawing(figure, "Client updates that were left out up to each round, mean over seeds.")


def price_drawing(arms: Sequence[Arm], target: float) -> Drawing:
    """Bytes to a target in %: a mark a seed, the mean as a bar."""
    figure, axes = _bars(arms)
    for place, arm in enumerate(arms):
        if values := prices(arm, target):
            axes.barh(place, fmean(values), color=arm.style.color, alpha=0.35, height=BAR)
            axes.plot(values, [place] * len(values), arm.style.marker, color=arm.style.color, markersize=5)
        else:
            where = axes.get_yaxis_transform()
            axes.text(0.01, place, "never", transform=where, va="center", fontsize=9, color="0.4")
    lay_out(axes, "MB moved by all clients", "", f"Bytes to {target:g} % test accuracy")
    axes.set_xlim(left=0)
    return Drawing(figure, f"Bytes until an evaluation first reached {target:g} %: the mean, and a mark a seed.")


def _bars(arms: Sequence[Arm]) -> tuple[Figure, Axes]:
    """Return a picture with room for a bar an arm and its label above it, where a long one takes no width."""
    labels = [wrapped(arm.label) for arm in arms]
    figure, axes = new_figure(height=1.5 + len(arms) * (0.3 + 0.15 * max(map(lines_of, labels))))
    for place, label in enumerate(labels):
        where = axes.get_yaxis_transform()
        axes.text(0.005, place - 0.55 * BAR, label, transform=where, va="bottom", fontsize=9, parse_math=False)
    axes.set_yticks([])
    axes.set_ylim(len(arms) - 0.6, -0.9)
    return figure, axes
