"""What the runs of a cell have come to, read from their `metrics.jsonl` alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isfinite
from statistics import mean, stdev

from train.directory import METRICS_FILE
from train.provenance import Provenance
from train.report import History, megabytes
from train.tables.cells import Cell
from train.tables.layout import Setting


@dataclass(frozen=True)
class Outcome:
    """One cell and the rounds it has run so far.

    Attributes:
        lines: of its `metrics.jsonl`, none if it has not been started.
    """

    cell: Cell
    lines: list[dict[str, float]]

    @property
    def rounds(self) -> int:
        """Rounds that it has run."""
        return len(self.lines)

    @property
    def finished(self) -> bool:
        """Whether it has run all its rounds."""
        return self.rounds == self.cell.config.rounds

    @property
    def accuracy(self) -> float | None:
        """The last test accuracy in %, or None before the first evaluation."""
        evaluated = [line["test_accuracy"] for line in self.lines if "test_accuracy" in line]
        return 100 * evaluated[-1] if evaluated else None

    @property
    def lost(self) -> int:
        """Trainings of clients that were left out, because they diverged or failed."""
        return int(sum(line["failed"] for line in self.lines))

    @property
    def seconds(self) -> float:
        """Seconds of all its rounds."""
        return sum(line["seconds"] for line in self.lines)

    @cached_property
    def megabytes(self) -> list[float]:
        """MB that all clients have moved, down and up, after each round."""
        return list(accumulate(map(megabytes, self.lines)))

    def curve(self, x: str, y: str, smooth: float) -> tuple[list[float], list[float]]:
        """Return the points (x, y) of the rounds that have y, smoothed; accuracies in %."""
        factor = 100 if y.endswith("accuracy") else 1
        rows = [index for index, line in enumerate(self.lines) if _is_number(line.get(y))]
        xs = [self.megabytes[index] if x == "bytes" else self.lines[index]["round"] + 1 for index in rows]
        return xs, moving_average([factor * self.lines[index][y] for index in rows], smooth)


Grid = Mapping[tuple[Setting, str], Sequence[Outcome]]  # the seeds of each setting and strategy


@dataclass(frozen=True)
class Summary:
    """A setting and strategy over its finished seeds: mean and standard deviation in %, None where unknown.

    Attributes:
        lost: trainings of clients that were left out, of all seeds together.
    """

    count: int
    mean: float | None = None
    deviation: float | None = None
    lost: int = 0

    def __str__(self) -> str:
        return entry(self.mean, self.deviation, digits=1) + (f" ({self.lost} lost)" if self.lost else "")


def read_outcome(cell: Cell) -> Outcome:
    """Read what a cell has run; a cell that was never started has no lines."""
    if not (cell.config.directory / METRICS_FILE).exists():
        return Outcome(cell, [])
    return Outcome(cell, History.read(cell.config.directory).lines)


def remarks_on(outcomes: Iterable[Outcome]) -> list[str]:
    """Return in what the data of these runs differ from the official ones, as their directories say."""
    held = [Provenance.read(outcome.cell.config.directory) for outcome in outcomes if outcome.rounds]
    return list(dict.fromkeys(remark for its in held if its for each in its.data.values() for remark in each))


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Average the accuracies of the finished ones."""
    finished = [outcome for outcome in outcomes if outcome.finished]
    accuracies = [outcome.accuracy for outcome in finished if outcome.accuracy is not None]
    if not accuracies:
        return Summary(0)
    deviation = stdev(accuracies) if len(accuracies) > 1 else None
    return Summary(len(accuracies), mean(accuracies), deviation, sum(outcome.lost for outcome in finished))


def entry(average: float | None, deviation: float | None, digits: int) -> str:
    """Return ``82.59 ± 0.27``, without the deviation if there is none, and a dash for nothing."""
    if average is None:
        return "–"
    return f"{average:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


def moving_average(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponentially weighted moving average: mₜ = w·mₜ₋₁ + (1−w)·xₜ over its own total weight 1 − wᵗ.

    Dividing by the total weight keeps the first values from being drawn towards zero.
    """
    averages, running = [], 0.0
    for count, value in enumerate(values, start=1):
        running = weight * running + (1 - weight) * value
        averages.append(running / (1 - weight**count))
    return averages


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)
