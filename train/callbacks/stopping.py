"""Callbacks that end a run: it was asked to stop, or all updates are lost."""

import logging
from collections import Counter
from collections.abc import Iterable

from sharding.rounds.failures import Kind
from train.callbacks.callback import Callback, Plans
from train.experiment.metrics import RoundMetrics
from train.rundir.status import MAX_LOST, has_diverged
from train.utils.errors import RunError
from train.utils.signals import StopRequest

log = logging.getLogger(__name__)

LOST_NOTE = "metrics.jsonl (with privacy, the log) says why"


class DivergedError(RunError):
    """No client's update was usable for too long, so that more rounds would train nothing."""


class LostRounds(Callback):
    """Ends a run after five rounds in a row without a usable update; warns at the end if it lost fewer rounds.

    Args:
        rounds: the number of rounds of the run; a shorter run ends when all of its rounds were lost.
        note: the end of the warning.
        earlier: metrics of the rounds that an earlier process finished. After five lost ones, one more ends the run.

    Attributes:
        diverged: whether the last rounds were all lost.
    """

    def __init__(
        self,
        rounds: int,
        note: str = LOST_NOTE,
        earlier: Iterable[RoundMetrics] = (),
    ) -> None:
        self._rounds, self._note = rounds, note
        self._lost: list[bool] = []
        self._last_lost: RoundMetrics | None = None
        for metrics in earlier:
            self._count(metrics)
        self.diverged = len(self._lost) == rounds and has_diverged(self._lost, rounds)

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool:
        """Note whether the round was lost; return whether the run has diverged."""
        self._count(metrics)
        self.diverged = has_diverged(self._lost, self._rounds)
        return self.diverged

    def raise_if_diverged(self) -> None:
        """Raise a `DivergedError` if the last rounds were all lost."""
        if self.diverged:
            raise DivergedError(
                f"no client's update could be used in {min(MAX_LOST, self._rounds)} rounds in a row: {self.reason}"
            )

    @property
    def reason(self) -> str:
        """Why most clients failed in the last lost round, and what to do if they diverged."""
        assert self._last_lost is not None
        kinds, failures = self._last_lost.failed_by_kind, self._last_lost.failures
        if kinds is None or failures is None:  # with privacy
            return "the log has the reasons"
        told = "metrics.jsonl has the reasons of all clients under failures"
        if 2 * kinds.get(Kind.NOT_FINITE, 0) >= sum(kinds.values()):
            return f"the training diverged, so lower the learning rates or local.clip, and run it again; {told}"
        return f"most failed with {Counter(failures.values()).most_common(1)[0][0]!r}; {told}"

    def _count(self, metrics: RoundMetrics) -> None:
        self._lost.append(metrics.is_lost)
        if metrics.is_lost:
            self._last_lost = metrics

    def close(self, failed: bool = False) -> None:
        """Warn of the rounds that were lost."""
        if any(self._lost) and not self.diverged:
            log.warning("%d of %d rounds had no update; %s", sum(self._lost), len(self._lost), self._note)


class Interruption(Callback):
    """Ends the run after the round in which it was asked to stop."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool:
        """Return whether the run was asked to stop."""
        return self._request.signal is not None
