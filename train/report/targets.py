"""The cost to reach an accuracy: the fairest single number to compare strategies."""

from collections.abc import Sequence
from contextlib import suppress
from math import floor
from statistics import fmean

from sharding.errors import UserError
from train.report.arms import Arm
from train.report.history import History
from train.report.plots import mean_band
from train.report.text import mean_and_spread
from train.rundir.records import read_clients


def choose_targets(arms: Sequence[Arm]) -> list[float]:
    """Return the configurations' target accuracies in %; without any, up to three that were reached.

    These are multiples of 5 % above chance: one that the worst arm reached, one that only the best reached, and one
    between.
    """
    if aimed := targets_of(arms):
        return aimed
    best = [max(mean_band(curves).means) for arm in arms if (curves := arm.curves("test_accuracy"))]
    if not best:
        return []
    ends = min(best), max(best)
    chosen = {5.0 * floor(value / 5) for value in (ends[0], fmean(ends), ends[1])}
    return sorted(target for target in chosen if target > _chance(arms))


def targets_of(arms: Sequence[Arm]) -> list[float]:
    """Return the target accuracies of the runs' configurations, in %."""
    aimed = {arm.settings.get("target_accuracy") for arm in arms}
    return sorted(100 * target for target in aimed if target is not None)


def spent_until(run: History, target: float, unit: str) -> float | None:
    """Return the cost in `unit` (of `AMOUNTS`) until an evaluation first reached a target in %, or None."""
    return next((point.x for point in run.curve("test_accuracy", unit) if point.y >= target - 1e-9), None)


def prices(arm: Arm, target: float, unit: str = "bytes") -> list[float]:
    """Return the cost of each seed to reach a target in %, without the seeds that never did."""
    return [spent for run in arm.runs if (spent := spent_until(run, target, unit)) is not None]


def price(arm: Arm, target: float) -> str:
    """Return the MB that the seeds of an arm moved to reach a target in %, and how many never did."""
    reached = prices(arm, target)
    if not reached:
        return "never"
    never = len(arm.runs) - len(reached)
    return mean_and_spread(reached, ",.1f") + (f" ({never} of {len(arm.runs)} seeds never)" if never else "")


def _chance(arms: Sequence[Arm]) -> float:
    """Return the accuracy in % of guessing on the data with fewest classes; 0 if no run records its classes."""
    counts: list[list[list[int]]] = []
    for arm in arms:
        with suppress(UserError):  # the page reports a damaged file where it draws the clients
            counts += [clients["classes"] for clients in read_clients(arm.runs[0].directory).values()]
    return max((100 / len(classes[0]) for classes in counts if classes), default=0.0)
