"""Times at which runs on a simulated network reached their targets: tables beside published numbers, and a picture."""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from studies.curves import Curve, one_round, simulated_seconds, spent_to, spread
from train.pilots import Lesson
from train.report.plots import add_legend, styles_of
from train.report.text import NOTHING, markdown_table

Published = Mapping[str, tuple[float, float] | None]  # by scheme: mean and deviation of the seconds; None: not reached
Courses = Mapping[str, Sequence[Curve]]  # by scheme, one per seed


def main_table(courses: Courses, loss: float, accuracy: float, published: Published) -> str:
    """Return a table of the runs that arrived: rounds and seconds to the targets, and ratios to the proposed scheme."""
    heads = ("scheme", f"rounds to {loss}", f"seconds to {loss}", "ratio", "published seconds", "published ratio")
    first, rows = _mean([spent_to(its, simulated_seconds, loss=loss) for its in courses["proposed"]]), []
    for scheme, runs in courses.items():
        rounds, seconds = ([spent_to(its, cost, loss=loss) for its in runs] for cost in (one_round, simulated_seconds))
        spent = rounds, seconds, [spent_to(its, simulated_seconds, accuracy) for its in runs]
        ratio = _mean(seconds) / first
        arrived = f"{sum(not isnan(value) for value in seconds)} of {len(runs)}"
        to_loss, to_seconds, accurate = (spread(values, ",.0f", "not reached") for values in spent)
        shown = NOTHING if isnan(ratio) else f"{ratio:.2f}"
        rows.append([scheme, to_loss, to_seconds, shown, *_published(published, scheme), accurate, arrived])
    return markdown_table((*heads, f"seconds to {100 * accuracy:g} %", "arrived"), rows)


def pilot_table(lesson: Lesson, levels: Sequence[float], published: Mapping[str, Sequence[int]]) -> str:
    """Return a table of the pilots' rounds to each loss, and the β/α of each loss."""
    rows: list[list[object]] = []
    for name, rounds in lesson.rounds.items():
        rows.append([f"{name}, rounds", *(NOTHING if its is None else its for its in rounds)])
        rows.append([f"{name}, published", *published[name][: len(levels)]])
    both = [None not in pair for pair in zip(*lesson.rounds.values(), strict=True)]
    missing = ["contradicts" if reached else NOTHING for reached in both]
    each = [other if its is None else f"{its:.3g}" for its, other in zip(lesson.estimates, missing, strict=True)]
    return markdown_table(("loss", *levels), [*rows, ["β/α", *each]])


def figure(courses: Courses, loss: float, accuracy: float, title: str) -> Figure:
    """Draw training loss and test accuracy against seconds: each scheme's median in a band between its quartiles."""
    drawn = Figure(figsize=(10, 4), layout="constrained")
    drawn.suptitle(title, x=0.01, ha="left")
    losses, percents = drawn.subplots(1, 2)
    for scheme, style in styles_of(courses).items():
        seconds = [[at.simulated for at in its] for its in courses[scheme]]
        for axes, values in (
            (losses, [[at.train_set_loss for at in its] for its in courses[scheme]]),
            (percents, [[100 * at.test_accuracy for at in its] for its in courses[scheme]]),
        ):
            grid, (low, middle, high) = quartiles(seconds, values)
            axes.plot(grid, middle, color=style.color, linestyle=style.dash, label=scheme)
            axes.fill_between(grid, low, high, color=style.color, alpha=0.15, linewidth=0)
    _lay_out(losses, "training loss", loss)
    losses.set(yscale="log")
    _lay_out(percents, "test accuracy (%)", 100 * accuracy)
    add_legend(drawn, losses)
    return drawn


def _lay_out(axes: Axes, quantity: str, target: float) -> None:
    axes.axhline(target, color="0.5", linestyle=":")
    axes.set(xlabel="simulated seconds", ylabel=quantity, xscale="log")
    axes.grid(alpha=0.3)


def quartiles(
    seconds: Sequence[Sequence[float]], curves: Sequence[Sequence[float]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return times, (200,), and the quartiles of the curves at these times, (3, 200).

    A curve keeps its value until its next evaluation, and its last value forever.
    """
    grid = np.geomspace(max(times[0] for times in seconds), max(times[-1] for times in seconds), 200)
    pairs = zip(seconds, curves, strict=True)
    held = [np.array(curve)[np.searchsorted(times, grid * (1 + 1e-9), side="right") - 1] for times, curve in pairs]
    return grid, np.quantile(held, (0.25, 0.5, 0.75), axis=0)


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the runs that arrived, NaN without one."""
    there = [value for value in values if not isnan(value)]
    return fmean(there) if there else nan


def _published(published: Published, scheme: str) -> tuple[str, str]:
    """Return the published seconds and their ratio to the proposed scheme's."""
    if (its := published.get(scheme)) is None:
        return ("not reached" if scheme in published else NOTHING), NOTHING
    proposed = published["proposed"]
    assert proposed is not None
    return f"{its[0]:,.1f} ± {its[1]:,.1f}", f"{its[0] / proposed[0]:.2f}"
