"""What the studies of wireless sampling tell: when targets were reached, the published numbers beside ours."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from train.pilots import Lesson
from train.plots import add_legend, styles_of
from train.report.targets import mean_and_spread

SCALED, EQ8 = "uniform, scaled steps", "uniform, Eq. 8"
LOSS, ACCURACY = "training loss", "test accuracy (%)"
SCHEMES = ("proposed", "Eq. 38", "statistical", "weighted", SCALED, EQ8)
Published = Mapping[str, tuple[float, float] | None]  # by scheme: mean and deviation of the seconds; None: not reached


class Told(Protocol):
    """What is told of a training."""

    def rounds_to(self, loss: float) -> int | None:
        """Return the rounds to a training loss, None if it was not reached."""

    def seconds_to(self, loss: float | None = None, accuracy: float | None = None) -> float | None:
        """Return the simulated seconds to a training loss or a test accuracy, None if it was not reached."""


class Course:
    """How a training went.

    Attributes:
        rounds: so many were done at each evaluation.
        seconds: simulated, so far.
        losses: of all training samples.
        accuracies: on the test split.
    """

    rounds: Sequence[int]
    seconds: Sequence[float]
    losses: Sequence[float]
    accuracies: Sequence[float]

    def rounds_to(self, loss: float) -> int | None:
        """Return the rounds to a training loss, None if it was not reached."""
        place = _first(np.array(self.losses) <= loss)
        return None if place is None else self.rounds[place]

    def seconds_to(self, loss: float | None = None, accuracy: float | None = None) -> float | None:
        """Return the simulated seconds to a training loss or a test accuracy, None if it was not reached."""
        trained = np.array(self.losses) <= (-1.0 if loss is None else loss)
        place = _first(trained | (np.array(self.accuracies) >= (2.0 if accuracy is None else accuracy)))
        return None if place is None else self.seconds[place]


class Band(NamedTuple):
    """Quartiles over the runs of a scheme at a time: of the training loss, or of the test accuracy in %."""

    scheme: str
    quantity: str
    seconds: float
    low: float
    middle: float
    high: float


def main_table(
    courses: Mapping[str, Sequence[Told]],
    loss: float,
    accuracy: float,
    published: Published,
    saved: Mapping[str, int] | None = None,
) -> list[str]:
    """Return rounds and seconds to the targets, and ratios to the proposed scheme, of the runs that arrived.

    `saved` is the published time, in %, that the proposed draws save on the way to the accuracy, where there is such.
    """
    heads = ["scheme", f"rounds to {loss}", f"seconds to {loss}", "ratio", "published seconds", "published ratio"]
    heads += [f"seconds to {100 * accuracy:g} %", *(["saved by proposed (published)"] if saved else []), "arrived"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    first = mean([course.seconds_to(loss) for course in courses["proposed"]])
    soonest = mean([course.seconds_to(accuracy=accuracy) for course in courses["proposed"]])
    for scheme, its in courses.items():
        rounds, seconds = [course.rounds_to(loss) for course in its], [course.seconds_to(loss) for course in its]
        ratio = f"{mean(seconds) / first:.2f}" if any(seconds) and first else "–"
        arrived = f"{sum(value is not None for value in seconds)} of {len(its)}"
        accurate = [course.seconds_to(accuracy=accuracy) for course in its]
        cells = [scheme, spread(rounds), spread(seconds), ratio, *_published(published, scheme), spread(accurate)]
        if saved:
            own = f"{100 * (1 - soonest / mean(accurate)):.0f} %" if soonest and mean(accurate) else "–"
            cells.append("–" if scheme == "proposed" else f"{own} ({saved[scheme]} %)" if scheme in saved else own)
        cells.append(arrived)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def pilot_table(lesson: Lesson, levels: Sequence[float], published: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the pilots' rounds to each loss, and β/α as each loss has it."""
    lines = [f"| loss | {' | '.join(map(str, levels))} |", "|---|" + "---:|" * len(levels)]
    for name, rounds in lesson.rounds.items():
        lines.append(f"| {name}, rounds | {' | '.join('–' if r is None else str(r) for r in rounds)} |")
        lines.append(f"| {name}, published | {' | '.join(map(str, published[name][: len(levels)]))} |")
    both = [None not in pair for pair in zip(*lesson.rounds.values(), strict=True)]
    missing = ["contradicts" if reached else "–" for reached in both]
    each = [other if its is None else f"{its:.3g}" for its, other in zip(lesson.estimates, missing, strict=True)]
    return [*lines, f"| β/α | {' | '.join(each)} |"]


def bands_of(courses: Mapping[str, Sequence[Course]]) -> list[Band]:
    """Return what a picture shows of the runs of each scheme."""
    found = []
    for scheme, its in courses.items():
        seconds = [course.seconds for course in its]
        percent = [[100 * value for value in course.accuracies] for course in its]
        for quantity, curves in ((LOSS, [course.losses for course in its]), (ACCURACY, percent)):
            grid, each = quartiles(seconds, curves)
            found += [Band(scheme, quantity, *map(float, point)) for point in zip(grid, *each, strict=True)]
    return found


def figure(bands: Sequence[Band], loss: float, accuracy: float, title: str) -> Figure:
    """Return training loss and test accuracy against seconds: a scheme's median in a band of the middle half."""
    drawn = Figure(figsize=(10, 4), layout="constrained")
    drawn.suptitle(title, x=0.01, ha="left")
    panels = dict(zip((LOSS, ACCURACY), drawn.subplots(1, 2), strict=True))
    styles = styles_of(dict.fromkeys(band.scheme for band in bands))
    for scheme, style in styles.items():
        for quantity, axes in panels.items():
            points = [band[2:] for band in bands if band[:2] == (scheme, quantity)]
            grid, low, middle, high = zip(*points, strict=True)
            axes.plot(grid, middle, color=style.color, linestyle=style.dash, label=scheme)
            axes.fill_between(grid, low, high, color=style.color, alpha=0.15, linewidth=0)
    panels[LOSS].axhline(loss, color="0.5", linestyle=":")
    panels[LOSS].set(yscale="log")
    panels[ACCURACY].axhline(100 * accuracy, color="0.5", linestyle=":")
    for quantity, axes in panels.items():
        axes.set(xlabel="simulated seconds", ylabel=quantity, xscale="log")
        axes.grid(alpha=0.3)
    add_legend(drawn, panels[LOSS])
    return drawn


def quartiles(
    seconds: Sequence[Sequence[float]], curves: Sequence[Sequence[float]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return times, (200,), and the quartiles of some curves at these, (3, 200).

    A curve keeps its value from one evaluation to the next, and its last one for good.
    """
    grid = np.geomspace(max(times[0] for times in seconds), max(times[-1] for times in seconds), 200)
    pairs = zip(seconds, curves, strict=True)
    held = [np.array(curve)[np.searchsorted(times, grid * (1 + 1e-9), side="right") - 1] for times, curve in pairs]
    return grid, np.quantile(held, (0.25, 0.5, 0.75), axis=0)


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of what there is, 0 if nothing is."""
    there = [value for value in values if value is not None]
    return fmean(there) if there else 0.0


def spread(values: Sequence[float | None]) -> str:
    """Return mean ± deviation of what there is, and how much of it there is where that is not all."""
    there = [value for value in values if value is not None]
    missing = f" ({len(there)} of {len(values)})" if 0 < len(there) < len(values) else ""
    return f"{mean_and_spread(there, ',.0f')}{missing}" if there else "not reached"


def _published(published: Published, scheme: str) -> tuple[str, str]:
    """Return the published seconds and their ratio to those of the proposed scheme."""
    if (its := published.get(scheme)) is None:
        return ("not reached" if scheme in published else "–"), "–"
    proposed = published["proposed"]
    assert proposed is not None
    return f"{its[0]:,.1f} ± {its[1]:,.1f}", f"{its[0] / proposed[0]:.2f}"


def _first(reached: NDArray[np.bool_]) -> int | None:
    places = np.flatnonzero(reached)
    return int(places[0]) if places.size else None
