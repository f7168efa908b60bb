"""Draw the pictures of the page; each has one panel, to be legible on a phone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.report.frame import mean_curve
from train.report.groups import RunGroup
from train.report.plots import (
    LABELS,
    OKABE_ITO,
    add_legend,
    curve_figure,
    displayed,
    lay_out,
    lay_out_log,
    new_figure,
    styles_of,
)
from train.rundir.records import Layers

ACCURACIES = {
    "rounds": "Accuracy by round",
    "bytes_total": "Accuracy by bytes",
    "simulated_total": "Accuracy by simulated time",
}


@dataclass(frozen=True)
class Drawing:
    """A picture and its caption."""

    figure: Figure
    caption: str


def legend_drawing(groups: Sequence[RunGroup]) -> Drawing:
    """Draw the legend that all pictures of an experiment share."""
    figure, axes = new_figure(height=0.9)
    for group in groups:
        axes.plot([], [], **group.style.line(1), label=group.label)
    axes.set_axis_off()
    add_legend(figure, axes)
    return Drawing(figure, "The lines of all pictures of this experiment.")


def grid_drawing(groups: Sequence[RunGroup], title: str = "Accuracy over the grid") -> Drawing | None:
    """Draw the final accuracy over the varied key with most numbers, a line for each setting of the other keys.

    Return None where no numeric key was varied while the others stayed the same.
    """
    scored = [group for group in groups if len(group.percents)]
    keys = [key for key in (scored[0].varied if scored else ()) if all(_is_numeric(group, key) for group in scored)]
    key = max(keys, key=lambda key: len({group.varied[key] for group in scored}), default="")
    lines: dict[str, list[RunGroup]] = {}
    for group in scored if key else ():
        others = (f"{name}={value}" for name, value in group.varied.items() if name != key)
        lines.setdefault(", ".join([group.strategy, *others]), []).append(group)
    if max(map(len, lines.values()), default=0) < 2:
        return None
    figure, axes = new_figure()
    for (label, line), style in zip(lines.items(), styles_of(lines).values(), strict=True):
        points = sorted((float(group.varied[key]), group.percents.mean(), group.percents.std()) for group in line)
        xs, means, deviations = (np.nan_to_num(values) for values in zip(*points, strict=True))
        axes.errorbar(xs, means, deviations, **style.line(len(xs)), capsize=3, label=label)
    lay_out(axes, key, LABELS["test_accuracy"], title)
    values = [float(group.varied[key]) for group in scored]
    if 0 < 5 * min(values) <= max(values):
        lay_out_log(axes, "x")
    add_legend(figure, axes)
    return Drawing(figure, f"Test accuracy after the last round over {key}, mean ± standard deviation over seeds.")


def _is_numeric(group: RunGroup, key: str) -> bool:
    with suppress(ValueError):
        return isfinite(float(group.varied.get(key, "nan")))
    return False


def accuracy_drawings(groups: Sequence[RunGroup], targets: Sequence[float]) -> Iterator[Drawing]:
    """Draw the accuracy over rounds, bytes and, with a simulated clock, seconds, and that of each of several models."""
    dotted = " Dotted: the targets." if targets else ""
    timed = any(group.rounds.simulated_seconds.notna().any() for group in groups)
    for x, title in ACCURACIES.items():
        if x != "simulated_total" or timed:
            caption = f"Test accuracy against {LABELS[x]}.{dotted}"
            yield from curve_drawings(groups, "test_accuracy", title, caption, x=x, targets=targets)
    for key in groups[0].rounds.filter(regex="/test_accuracy$"):
        model = key.removesuffix("/test_accuracy")
        yield from curve_drawings(groups, key, f"Model {model}", f"Test accuracy of {model} by round.")


def curve_drawings(
    groups: Sequence[RunGroup],
    y: str,
    title: str,
    caption: str,
    x: str = "rounds",
    targets: Sequence[float] = (),
    log: bool = False,
) -> Iterator[Drawing]:
    """Draw one metric of all groups, mean and band over seeds; nothing if no run has it."""
    curves = {group.label: mean_curve(group.rounds, y, x) for group in groups}
    values = pd.concat([group.rounds.get(y, pd.Series(dtype=float)) for group in groups])
    values = displayed(values[np.isfinite(values)], y)
    if values.empty:
        return
    figure = curve_figure(curves, {group.label: group.style for group in groups}, x, y, title, targets)
    axes, usual = figure.axes[0], values.median()
    if log and values.min() > 0:
        lay_out_log(axes, "y")
    elif values.max() > 20 * usual > 0:  # a few huge values would hide all the others
        axes.set_ylim(top=4 * usual)
        caption += " Part of a run that diverged is above the picture."
    yield Drawing(figure, caption)


def layer_drawings(layers_of: Mapping[str, Layers], groups: Sequence[RunGroup]) -> Iterator[Drawing]:
    """Draw π and ω of up to three layers, for each group's smallest keep ratio; layers are by the group's label."""
    names = list(dict.fromkeys(name for layers in layers_of.values() for name in layers))
    for name in dict.fromkeys(names[round(share * (len(names) - 1))] for share in (0, 0.5, 1)):
        for symbol, key, words in (("π", "inclusion", "inclusion probability"), ("ω", "multipliers", "multiplier")):
            figure, axes = new_figure()
            for group in groups:
                if records := layers_of.get(group.label, {}).get(name):
                    values = getattr(min(records, key=lambda record: record.keep_ratio), key)
                    axes.plot(range(1, len(values) + 1), values, **group.style.line(len(values)), drawstyle="steps-mid")
            lay_out(axes, "singular term", f"{symbol}, {words}", f"{symbol} of {name}")
            if symbol == "ω":
                lay_out_log(axes, "y")
            ratio = "of the smallest keep ratio, the largest term first"
            yield Drawing(figure, f"{symbol} of the terms of {name} in the last record, {ratio}.")


def partition_drawings(clients: Mapping[str, Any], name: str) -> Iterator[Drawing]:
    """Draw the samples of each client, colored by keep ratio, and each client's share of every class."""
    samples, ratios = np.array(clients["samples"]), np.array(clients["keep_ratios"])
    figure, axes = new_figure()
    axes.set_axisbelow(True)
    for index, ratio in enumerate(sorted(set(ratios.tolist()))):
        mine = np.flatnonzero(ratios == ratio)
        color = OKABE_ITO[index % len(OKABE_ITO)]
        axes.bar(mine, samples[mine], width=0.9, color=color, label=f"r = {ratio:g}", snap=False)  # thin bars stay
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
