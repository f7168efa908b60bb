"""Callbacks that end a run: it was asked to stop, or all updates are lost."""

import logging
from collections.abc import Iterable

from train.callbacks.callback import Callback, Plans
from train.metrics import RoundMetrics
from train.rundir.status import MAX_LOST
from train.utils.errors import RunError
from train.utils.signals import StopRequest

log = logging.getLogger(__name__)


class DivergedError(RunError):
    """No client's update was usable for too long, so that more rounds would train nothing."""


class LostRounds(Callback):
    """Ends a run after five rounds in a row without a usable update; warns at the end if it lost fewer rounds.

    Args:
        rounds: of the run; a shorter run ends when all of its rounds were lost.
        note: ends the warning.
        earlier: metrics of the rounds that an earlier process finished. After five lost ones, one more ends the run.
    """

    def __init__(self, rounds: int, note: str = "metrics.jsonl says why", earlier: Iterable[RoundMetrics] = ()) -> None:
        self._note = note
        self._limit, self._in_a_row, self._lost, self._rounds = min(MAX_LOST, rounds), 0, 0, 0
        for metrics in earlier:
            self._count(metrics)
        if self._rounds < rounds:
            self._in_a_row = min(self._in_a_row, self._limit - 1)

    @property
    def diverged(self) -> bool:
        """Whether the last rounds were all lost."""
        return self._in_a_row >= self._limit

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool:
        """Count a round; return whether the run has diverged."""
        self._count(metrics)
        return self.diverged

    def raise_if_diverged(self) -> None:
        """Raise a `DivergedError` if the last rounds were all lost."""
        if self.diverged:
            raise DivergedError(
                f"no client's update could be used in {self._limit} rounds in a row; metrics.jsonl gives the reasons "
                "under failures. If the training diverged, lower the learning rates or local.clip, and run it again"
            )

    def close(self, failed: bool = False) -> None:
        """Warn of the rounds that were lost."""
        if self._lost and not self.diverged:
            log.warning("%d of %d rounds had no update; %s", self._lost, self._rounds, self._note)

    def _count(self, metrics: RoundMetrics) -> None:
        self._rounds, self._lost = self._rounds + 1, self._lost + metrics.is_lost
        self._in_a_row = self._in_a_row + 1 if metrics.is_lost else 0


class Interruption(Callback):
    """Ends the run after the round in which it was asked to stop."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool:
        """Return whether the run was asked to stop."""
        return self._request.signal is not None
