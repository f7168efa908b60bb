"""Times at which runs on a simulated network reached their targets: tables beside published numbers, and a picture."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from studies.curves import costs_to, spread
from train.report.plots import add_legend, styles_of
from train.report.text import NOTHING, markdown_table
from train.variants.pilots import Calibration

Published = Mapping[str, tuple[float, float] | None]  # by scheme: mean and deviation of the seconds; None: not reached


def main_table(curves: pd.DataFrame, loss: float, accuracy: float, published: Published) -> pd.DataFrame:
    """Return each scheme's rounds and seconds to the targets, of runs that arrived, and ratios to the first scheme."""
    first, rows = None, []
    for scheme, runs in curves.groupby("scheme", sort=False):
        reached, seeds = runs.train_set_loss <= loss, runs.seed.unique()
        rounds, seconds = (costs_to(runs, reached, cost, seeds) for cost in ("rounds", "simulated"))
        accurate = costs_to(runs, runs.test_accuracy >= accuracy, "simulated", seeds)
        first = seconds.mean() if first is None else first
        ratio, (published_seconds, published_ratio) = seconds.mean() / first, _published(published, str(scheme))
        rows.append(
            {
                "scheme": scheme,
                f"rounds to {loss}": spread(rounds, ",.0f", "not reached"),
                f"seconds to {loss}": spread(seconds, ",.0f", "not reached"),
                "ratio": NOTHING if np.isnan(ratio) else f"{ratio:.2f}",
                "published seconds": published_seconds,
                "published ratio": published_ratio,
                f"seconds to {100 * accuracy:g} %": spread(accurate, ",.0f", "not reached"),
                "arrived": f"{seconds.notna().sum()} of {len(seeds)}",
            }
        )
    return pd.DataFrame(rows)


def pilot_table(calibration: Calibration, levels: Sequence[float], published: Mapping[str, Sequence[int]]) -> str:
    """Return a table of the pilots' rounds to each loss, and the β/α of each loss."""
    rows: list[list[object]] = []
    for name, rounds in calibration.rounds.items():
        rows.append([f"{name}, rounds", *(NOTHING if number is None else number for number in rounds)])
        rows.append([f"{name}, published", *published[name][: len(levels)]])
    both = [None not in pair for pair in zip(*calibration.rounds.values(), strict=True)]
    missing = ["contradicts" if reached else NOTHING for reached in both]
    pairs = zip(calibration.estimates, missing, strict=True)
    each = [other if estimate is None else f"{estimate:.3g}" for estimate, other in pairs]
    return markdown_table(("loss", *levels), [*rows, ["β/α", *each]])


def figure(curves: pd.DataFrame, loss: float, accuracy: float, title: str) -> Figure:
    """Draw training loss and test accuracy against seconds: each scheme's median in a band between its quartiles."""
    drawn = Figure(figsize=(10, 4), layout="constrained")
    drawn.suptitle(title, x=0.01, ha="left")
    losses, percents = drawn.subplots(1, 2)
    styles = styles_of(curves.scheme.unique())
    for scheme, runs in curves.groupby("scheme", sort=False):
        by_run = runs.assign(percent=100 * runs.test_accuracy).groupby("run")
        seconds = by_run.simulated.agg(list)
        for axes, metric in ((losses, "train_set_loss"), (percents, "percent")):
            grid, (low, middle, high) = quartiles(seconds, by_run[metric].agg(list))
            style = styles[scheme]
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
    values = [np.array(curve)[np.searchsorted(times, grid * (1 + 1e-9), side="right") - 1] for times, curve in pairs]
    return grid, np.quantile(values, (0.25, 0.5, 0.75), axis=0)


def _published(published: Published, scheme: str) -> tuple[str, str]:
    """Return the published seconds and their ratio to the proposed scheme's."""
    if (seconds := published.get(scheme)) is None:
        return ("not reached" if scheme in published else NOTHING), NOTHING
    proposed = published["proposed"]
    assert proposed is not None
    return f"{seconds[0]:,.1f} ± {seconds[1]:,.1f}", f"{seconds[0] / proposed[0]:.2f}"
