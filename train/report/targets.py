"""What it cost to reach an accuracy: the fairest single number to compare strategies by."""

from collections.abc import Sequence
from contextlib import suppress
from math import floor
from statistics import fmean, mean, stdev

from sharding.errors import UserError
from train.plots import mean_band
from train.records import read_clients
from train.report.history import AMOUNTS, Arm, History, evaluations


def targets_of(arms: Sequence[Arm]) -> list[float]:
    """Return the accuracies that the runs' configurations aim at, in %."""
    aimed = {arm.settings.get("target_accuracy") for arm in arms}
    return sorted(100 * target for target in aimed if target is not None)


def reached_targets(arms: Sequence[Arm]) -> list[float]:
    """Return up to three multiples of 5 %: what the worst arm reached, what the best did, and one between.

    Those that guessing reaches are left out.
    """
    best = [max(mean_band(curves).means) for arm in arms if (curves := arm.curves("test_accuracy"))]
    if not best:
        return []
    ends = min(best), max(best)
    chosen = {5.0 * floor(value / 5) for value in (ends[0], fmean(ends), ends[1])}
    return sorted(target for target in chosen if target > _chance(arms))


def _chance(arms: Sequence[Arm]) -> float:
    """Return the accuracy in % of guessing, of the data with fewest classes; 0 where no run tells its classes."""
    told: list[list[list[int]]] = []
    for arm in arms:
        with suppress(UserError):  # a spoiled file is told of where the clients are drawn
            told += [clients["classes"] for clients in read_clients(arm.runs[0].directory).values()]
    return max((100 / len(classes[0]) for classes in told if classes), default=0.0)


def spent_until(run: History, target: float, unit: str) -> float | None:
    """Return the `unit` (of `AMOUNTS`) spent until an evaluation first reached a target in %, or None."""
    found = evaluations(run.lines, AMOUNTS[unit])
    return next((spent for spent, accuracy in found if 100 * accuracy >= target - 1e-9), None)


def mean_and_spread(values: Sequence[float], form: str = ".1f") -> str:
    """Return ``mean ± standard deviation``, the mean alone of a single value."""
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def price(arm: Arm, target: float, unit: str = "") -> str:
    """Return the MB that the seeds of an arm moved to reach a target in %, and how many never did."""
    spent = [spent_until(run, target, "bytes") for run in arm.runs]
    reached = [value for value in spent if value is not None]
    if not reached:
        return "never"
    never = f" ({len(spent) - len(reached)} of {len(spent)} seeds never)" if len(reached) < len(spent) else ""
    return f"{mean_and_spread(reached, ',.1f')}{unit}{never}"
