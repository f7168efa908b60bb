"""The picture of a study: test accuracy, and the clients' loss, against a cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle

import numpy as np
from matplotlib.figure import Figure

from studies.curves import Amount, Curve, one_round
from train.report.plots import DASHES, Point, add_legend, draw_band, draw_targets, lay_out_log, styles_of


def accuracies(its: Curve) -> list[float]:
    """Return the test accuracy of every evaluation, in %."""
    return [100 * at.test_accuracy for at in its]


def lowest_losses(its: Curve) -> list[float]:
    """Return the lowest training loss of the clients up to every evaluation; NaN before the first."""
    return [float(lowest) for lowest in accumulate((at.train_loss for at in its), np.fmin)]


ROWS: Mapping[str, Callable[[Curve], list[float]]] = {
    "test accuracy (%)": accuracies,
    "lowest training loss": lowest_losses,
}


def draw(
    groups: Mapping[str, Sequence[Curve]],
    axes_of: Mapping[str, Amount],
    title: str,
    targets: Sequence[float] = (),
    rows: int = 1,
) -> Figure:
    """Draw test accuracy against each cost: one line style per group, the mean of its runs in a band of one deviation.

    Args:
        groups: runs that differ only in their seeds, by name.
        axes_of: one panel per cost, by its name; rounds are on a linear axis, others on a logarithmic one.
        title: the title of the picture.
        targets: target accuracies, in 0…1.
        rows: 2 for the lowest training loss so far, on a logarithmic axis, below the accuracy.
    """
    # Curves may coincide, so each has its own dashes as well as a color.
    dashes = cycle(DASHES)
    styles = {name: replace(style, dash=next(dashes)) for name, style in styles_of(groups).items()}
    figure = Figure(figsize=(5 * len(axes_of), 1 + 3 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    panels = figure.subplots(rows, len(axes_of), squeeze=False)
    for row, (score, scores) in zip(panels, ROWS.items(), strict=False):
        for axes, (label, amount) in zip(row, axes_of.items(), strict=True):
            for name, runs in groups.items():
                draw_band(axes, [_points(its, amount, scores) for its in runs], styles[name], name)
            axes.set(xlabel=label, ylabel=score)
            if amount is not one_round:
                lay_out_log(axes, "x")
            axes.grid(alpha=0.3)
            if scores is lowest_losses:
                lay_out_log(axes, "y")
            else:
                draw_targets(axes, [100 * target for target in targets])
    add_legend(figure, panels[0][0])
    return figure


def _points(its: Curve, amount: Amount, scores: Callable[[Curve], list[float]]) -> list[Point]:
    return [Point(place, amount(at), score) for place, (at, score) in enumerate(zip(its, scores(its), strict=True))]
