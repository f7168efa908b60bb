"""Draw the pictures of the page; each has one panel, so that it is legible on a phone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.report.arms import Arm, prices
from train.report.plots import (
    LABELS,
    OKABE_ITO,
    add_legend,
    curve_figure,
    deviation,
    lay_out,
    lay_out_log,
    lines_of,
    new_figure,
    styles_of,
    wrapped,
)
from train.rundir.records import Layers

PHASES = {"plan": "#0072B2", "train": "#E69F00", "aggregate": "#009E73", "evaluate": "#CC79A7", "rest": "#BBBBBB"}
ACCURACIES = {"rounds": "Accuracy by round", "bytes": "Accuracy by bytes", "simulated": "Accuracy by simulated time"}
BAR = 0.45  # height, of 1 from bar to bar


@dataclass(frozen=True)
class Drawing:
    """A picture and its caption."""

    figure: Figure
    caption: str


def legend_drawing(arms: Sequence[Arm]) -> Drawing:
    """Draw the legend that all pictures of an experiment share."""
    figure, axes = new_figure(height=0.9)
    for arm in arms:
        axes.plot([], [], **arm.style.line(1), label=arm.label)
    axes.set_axis_off()
    add_legend(figure, axes)
    return Drawing(figure, "The lines of all pictures of this experiment.")


def grid_drawing(arms: Sequence[Arm], title: str = "Accuracy over the grid") -> Drawing | None:
    """Draw the final accuracy over the varied key with most numbers, a line for each setting of the other keys.

    Returns:
        The picture; None where no numeric key was varied while the others stayed the same.
    """
    scored = [arm for arm in arms if arm.finals]
    keys = [key for key in (scored[0].varied if scored else ()) if all(_is_numeric(arm, key) for arm in scored)]
    key = max(keys, key=lambda key: len({arm.varied[key] for arm in scored}), default="")
    lines: dict[str, list[Arm]] = {}
    for arm in scored if key else ():
        others = (f"{name}={value}" for name, value in arm.varied.items() if name != key)
        lines.setdefault(", ".join([arm.strategy, *others]), []).append(arm)
    if max(map(len, lines.values()), default=0) < 2:
        return None
    figure, axes = new_figure()
    for (label, its), style in zip(lines.items(), styles_of(lines).values(), strict=True):
        points = sorted((float(arm.varied[key]), fmean(arm.finals), deviation(arm.finals)) for arm in its)
        xs, means, deviations = zip(*points, strict=True)
        axes.errorbar(xs, means, deviations, **style.line(len(xs)), capsize=3, label=label)
    lay_out(axes, key, LABELS["test_accuracy"], title)
    values = [float(arm.varied[key]) for arm in scored]
    if 0 < 5 * min(values) <= max(values):
        lay_out_log(axes, "x")
    add_legend(figure, axes)
    return Drawing(figure, f"Test accuracy after the last round over {key}, mean ± standard deviation over seeds.")


def _is_numeric(arm: Arm, key: str) -> bool:
    with suppress(ValueError):
        return isfinite(float(arm.varied.get(key, "nan")))
    return False


def accuracy_drawings(arms: Sequence[Arm], targets: Sequence[float]) -> Iterator[Drawing]:
    """Draw the accuracy, also of each task, over rounds, bytes and, with a simulated clock, seconds."""
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
    """Draw one metric of all arms, mean and band over seeds; nothing if no run has it."""
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
        caption += " Part of a run that diverged is above the picture."
    yield Drawing(figure, caption)


def law_drawings(laws: Mapping[str, Layers], arms: Sequence[Arm], when: str) -> Iterator[Drawing]:
    """Draw π and ω of up to three layers, for the smallest keep ratio of each arm.

    Args:
        laws: by the arm's label.
        arms: that are drawn.
        when: describes when the laws were recorded, for the caption.
    """
    names = list(dict.fromkeys(name for layers in laws.values() for name in layers))
    for name in dict.fromkeys(names[round(share * (len(names) - 1))] for share in (0, 0.5, 1)):
        for symbol, key, words in (("π", "inclusion", "inclusion probability"), ("ω", "multipliers", "multiplier")):
            figure, axes = new_figure()
            for arm in arms:
                if its := laws.get(arm.label, {}).get(name):
                    law = min(its, key=lambda law: law.keep_ratio)
                    values = getattr(law, key)
                    axes.plot(range(1, len(values) + 1), values, **arm.style.line(len(values)), drawstyle="steps-mid")
            lay_out(axes, "singular term", f"{symbol}, {words}", f"{symbol} of {name}")
            if symbol == "ω":
                lay_out_log(axes, "y")
            ratio = "of the smallest keep ratio, the largest term first"
            yield Drawing(figure, f"{symbol} of the terms of {name} {when}, {ratio}.")


def partition_drawings(clients: Mapping[str, Any], name: str) -> Iterator[Drawing]:
    """Draw the samples of each client, colored by keep ratio, and each client's share of every class."""
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
    """Draw the seconds of a round by phase, mean over rounds and seeds."""
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
    """Return the mean seconds of each phase of a round, and of the remaining time."""
    named = {phase: fmean(line.get(f"seconds_{phase}", 0.0) for line in arm.lines) for phase in PHASES}
    return named | {"rest": max(0.0, fmean(line["seconds"] for line in arm.lines) - sum(named.values()))}


def lost_drawing(arms: Sequence[Arm]) -> Drawing:
    """Draw the cumulative number of client updates that were left out."""
    figure, axes = new_figure()
    for arm in arms:
        totals = [np.cumsum([line["failed"] for line in run.lines]) for run in arm.runs]
        length = min(map(len, totals))
        average = np.mean([total[:length] for total in totals], axis=0)
        axes.plot(range(1, length + 1), average, **arm.style.line(length))
    lay_out(axes, "rounds", "client updates left out so far", "Lost clients")
    axes.set_ylim(bottom=0)
    return Drawing(figure, "Client updates that were left out up to each round, mean over seeds.")


def price_drawing(arms: Sequence[Arm], target: float) -> Drawing:
    """Draw the bytes to a target in %: the mean as a bar, and a mark for each seed."""
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
    return Drawing(figure, f"Bytes until an evaluation first reached {target:g} %: the mean, and a mark for each seed.")


def _bars(arms: Sequence[Arm]) -> tuple[Figure, Axes]:
    """Return a picture with room for one bar per arm, and its label above the bar, where long labels fit."""
    labels = [wrapped(arm.label) for arm in arms]
    figure, axes = new_figure(height=1.5 + len(arms) * (0.3 + 0.15 * max(map(lines_of, labels))))
    for place, label in enumerate(labels):
        where = axes.get_yaxis_transform()
        axes.text(0.005, place - 0.55 * BAR, label, transform=where, va="bottom", fontsize=9, parse_math=False)
    axes.set_yticks([])
    axes.set_ylim(len(arms) - 0.6, -0.9)
    return figure, axes
