"""The pictures of the page: each has one panel, so that it can be read on a phone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.plots import (
    LABELS,
    accuracy_figure,
    add_legend,
    draw_band,
    lay_out,
    lay_out_log,
    lines_of,
    new_figure,
    wrapped,
)
from train.records import LayerLaw, Layers
from train.report.history import Arm

PHASES = {"plan": "#0072B2", "train": "#E69F00", "aggregate": "#009E73", "evaluate": "#CC79A7", "rest": "#BBBBBB"}

BAR = 0.45  # height, of 1 from bar to bar


@dataclass(frozen=True)
class Drawing:
    """A picture, and what it shows in words."""

    figure: Figure
    caption: str


def accuracy_drawings(arms: Sequence[Arm], targets: Sequence[float]) -> Iterator[Drawing]:
    """Accuracy against rounds, bytes and, where the runs have a simulated clock, seconds; and the tasks' own."""
    styles = {arm.label: arm.style for arm in arms}
    titles = {"rounds": "Accuracy by round", "bytes": "Accuracy by bytes", "simulated": "Accuracy by simulated time"}
    timed = any("simulated_seconds" in run.lines[0] for arm in arms for run in arm.runs)
    for x, title in titles.items():
        if x != "simulated" or timed:
            curves = {arm.label: arm.curves("test_accuracy", x) for arm in arms}
            yield Drawing(accuracy_figure(curves, styles, x, title, targets), f"Test accuracy against {LABELS[x]}.")
    for task in _tasks(arms):
        curves = {arm.label: arm.curves(f"{task}/test_accuracy") for arm in arms}
        yield Drawing(
            accuracy_figure(curves, styles, "rounds", f"Task {task}", ()), f"Test accuracy of {task} by round."
        )


def metric_drawing(arms: Sequence[Arm], key: str, title: str, caption: str, log: bool = False) -> Drawing | None:
    """One metric against rounds, mean and band over seeds; None where no run has it."""
    if not any(arm.curves(key) for arm in arms):
        return None
    figure, axes = new_figure()
    for arm in arms:
        draw_band(axes, arm.curves(key), arm.style, arm.label)
    lay_out(axes, "rounds", key, title)
    if log and all(point.y > 0 for arm in arms for curve in arm.curves(key) for point in curve):
        lay_out_log(axes, "y")
    elif (top := _ceiling(arms, key)) is not None:
        axes.set_ylim(top=top)
        caption += " Some of a run that diverged is above the picture."
    add_legend(figure, axes)
    return Drawing(figure, caption)


def law_drawings(laws: Mapping[str, Layers], arms: Sequence[Arm], when: str) -> Iterator[Drawing]:
    """π and ω of up to three layers, one color a strategy, for the smallest keep ratio of each.

    Args:
        laws: by the arm's label.
        arms: that are drawn.
        when: they were recorded, in words.
    """
    names = list(dict.fromkeys(name for layers in laws.values() for name in layers))
    for name in _spread(names, 3):
        for symbol, attribute, words in (
            ("π", "inclusion", "inclusion probability"),
            ("ω", "multipliers", "multiplier"),
        ):
            figure, axes = new_figure()
            for arm in arms:
                if its := laws.get(arm.label, {}).get(name):
                    law = min(its, key=lambda law: law.keep_ratio)
                    values = getattr(law, attribute)
                    label = f"{arm.label} (r = {law.keep_ratio:g})"
                    look = arm.style.line(len(values))
                    axes.plot(range(1, len(values) + 1), values, **look, label=label, drawstyle="steps-mid")
            lay_out(axes, "singular term", f"{symbol}, {words}")
            axes.set_title(f"{symbol} of {name}", loc="left")
            if symbol == "ω":
                lay_out_log(axes, "y")
            add_legend(figure, axes)
            yield Drawing(figure, f"{symbol} of the terms of {name} {when}, the largest term first.")


def partition_drawings(clients: Mapping[str, Any], name: str) -> Iterator[Drawing]:
    """Who has what: samples of each client, shaded by keep ratio, and its share of every class."""
    samples, ratios = np.array(clients["samples"]), np.array(clients["keep_ratios"])
    figure, axes = new_figure()
    shades = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
    for place, ratio in enumerate(sorted(set(ratios.tolist()))):
        mine = ratios == ratio
        axes.bar(np.flatnonzero(mine), samples[mine], width=0.9, color=shades[place % 6], label=f"r = {ratio:g}")
    lay_out(axes, "client", "samples", f"{name}: samples and keep ratios")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(figure, axes)
    yield Drawing(figure, f"Samples of each of {len(samples)} clients, colored by keep ratio r.")
    if clients["classes"] is not None:
        counts = np.array(clients["classes"])
        figure, axes = new_figure()
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        image = axes.imshow(shares.T, aspect="auto", interpolation="nearest", cmap="cividis", vmin=0)
        axes.set(xlabel="client", ylabel="class")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
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
    lines = [line for run in arm.runs for line in run.lines]
    named = {phase: fmean(line.get(f"seconds_{phase}", 0.0) for line in lines) for phase in PHASES if phase != "rest"}
    return named | {"rest": max(0.0, fmean(line["seconds"] for line in lines) - sum(named.values()))}


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


def spread_drawing(arms: Sequence[Arm], spent: Sequence[Sequence[float]], target: float) -> Drawing:
    """Bytes to a target: a dot a seed, the mean as a bar."""
    figure, axes = _bars(arms)
    for place, (arm, values) in enumerate(zip(arms, spent, strict=True)):
        if values:
            axes.barh(place, fmean(values), color=arm.style.color, alpha=0.35, height=BAR)
            axes.plot(values, [place] * len(values), arm.style.marker, color=arm.style.color, markersize=5)
        else:
            axes.annotate(
                "never", (0.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=9, color="0.4"
            )
    lay_out(axes, "MB moved by all clients", "", f"Bytes to {target:g} % test accuracy")
    axes.set_xlim(left=0)
    return Drawing(figure, f"Bytes until an evaluation first reached {target:g} %: the mean, and a mark a seed.")


def even_laws(laws: Sequence[LayerLaw]) -> float:
    """Return the mean ANME over keep ratios, NaN where all is certain."""
    values = [law.anme for law in laws if not np.isnan(law.anme)]
    return fmean(values) if values else float("nan")


def _bars(arms: Sequence[Arm]) -> tuple[Figure, Axes]:
    """Return a picture with room for a bar an arm and its label above it, where a long one takes no width."""
    labels = [wrapped(arm.label) for arm in arms]
    figure, axes = new_figure(height=1.5 + len(arms) * (0.3 + 0.15 * max(map(lines_of, labels))))
    for place, label in enumerate(labels):
        where = axes.get_yaxis_transform()
        axes.text(0.005, place - 0.55 * BAR, label, transform=where, va="bottom", fontsize=9)
    axes.set_yticks([])
    axes.set_ylim(len(arms) - 0.6, -0.9)
    return figure, axes


def _ceiling(arms: Sequence[Arm], key: str) -> float | None:
    """Return where to cut a picture off that a few huge values would spoil, None where there are none."""
    values = [point.y for arm in arms for curve in arm.curves(key) for point in curve]
    usual = median(values)
    return 4 * usual if usual > 0 and max(values) > 20 * usual else None


def _tasks(arms: Sequence[Arm]) -> list[str]:
    return list(dict.fromkeys(task for arm in arms for task in arm.settings.get("tasks") or {}))


def _spread(names: Sequence[str], count: int) -> list[str]:
    """Return a few of the names, evenly from the first to the last."""
    if len(names) <= count:
        return list(names)
    return [names[round(place * (len(names) - 1) / (count - 1))] for place in range(count)]
