"""The picture of a study: test accuracy, and the clients' loss, against a cost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import pandas as pd
from matplotlib.figure import Figure

from train.report.frame import mean_curve
from train.report.plots import DASHES, add_legend, draw_band, draw_targets, lay_out_log, styles_of

ROWS = {"test_accuracy": "test accuracy (%)", "lowest_loss": "lowest training loss"}


def draw(
    curves: pd.DataFrame,
    costs: Mapping[str, str],
    title: str,
    targets: Sequence[float] = (),
    rows: int = 1,
) -> Figure:
    """Draw test accuracy against each cost: one line style per scheme, the mean of its runs in a band of one deviation.

    Args:
        curves: with a `scheme`; runs of a scheme differ only in their seeds.
        costs: one panel per column with a cost, by its label; rounds are on a linear axis, others on a logarithmic one.
        title: the title of the picture.
        targets: target accuracies, in 0…1.
        rows: 2 for the lowest training loss so far, on a logarithmic axis, below the accuracy.
    """
    if rows > 1:
        curves = curves.assign(lowest_loss=curves.groupby("run").train_loss.cummin())
    # Curves may coincide, so each has its own dashes as well as a color.
    dashes = cycle(DASHES)
    styles = {name: replace(style, dash=next(dashes)) for name, style in styles_of(curves.scheme.unique()).items()}
    figure = Figure(figsize=(5 * len(costs), 1 + 3 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    panels = figure.subplots(rows, len(costs), squeeze=False)
    for row, (metric, name) in zip(panels, ROWS.items(), strict=False):
        for axes, (label, cost) in zip(row, costs.items(), strict=True):
            for scheme, runs in curves.groupby("scheme", sort=False):
                draw_band(axes, mean_curve(runs, metric, cost), styles[scheme], scheme, cost, metric)
            axes.set(xlabel=label, ylabel=name)
            if cost != "rounds":
                lay_out_log(axes, "x")
            axes.grid(alpha=0.3)
            if metric == "lowest_loss":
                lay_out_log(axes, "y")
            else:
                draw_targets(axes, targets)
    add_legend(figure, panels[0][0])
    return figure
