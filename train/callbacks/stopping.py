"""End a run before its last round: it reached a target, its accuracy stalls, or all updates are lost."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from train.callbacks.base import Callback, FinishedRound
from train.config.schema import Config
from train.runtime.errors import RunError
from train.runtime.jsonl import MOST_LOST, is_lost
from train.runtime.signals import Request

log = logging.getLogger(__name__)


class EarlyStop(Callback):
    """Ends the run at its target accuracy or loss, or when the test accuracy has stopped improving.

    With `data.holdout` the test accuracy is that on the held-out samples.

    Args:
        config: sets the targets and the patience.
        lines: metrics of the rounds that an earlier process finished.
    """

    def __init__(self, config: Config, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._accuracy, self._loss, self._patience = config.target_accuracy, config.target_loss, config.patience
        self._reached: dict[str, str] = {}
        self._best, self._waited = -1.0, 0
        for line in lines:
            self.reason(line)

    def after_round(self, done: FinishedRound) -> None:
        """End the run if a criterion is met, and record the reason as `metrics["stopped"]`."""
        if (why := self.reason(done.metrics)) is not None:
            done.metrics["stopped"], done.last = why, True

    def reason(self, metrics: Mapping[str, Any]) -> str | None:
        """Process a round's metrics. Return why the run ends with this round, or None if it continues."""
        accuracy = metrics.get("test_accuracy")
        if accuracy is None:
            return None
        self._waited = 0 if accuracy > self._best else self._waited + 1
        self._best = max(self._best, accuracy)
        if self._reaches_all(accuracy, metrics.get("train_set_loss")):
            return " and ".join(self._reached.values())
        if self._patience is not None and self._waited >= self._patience:
            return f"the test accuracy has not improved in patience={self._patience} evaluations"
        return None

    def _reaches_all(self, accuracy: float, loss: float | None) -> bool:
        """Record targets reached for the first time; return whether all are reached."""
        if self._accuracy is not None and accuracy >= self._accuracy:
            reached = f"test accuracy {100 * accuracy:.1f} % has reached target_accuracy={self._accuracy:g}"
            self._reached.setdefault("accuracy", reached)
        if self._loss is not None and loss is not None and loss <= self._loss:
            self._reached.setdefault("loss", f"training loss {loss:.4g} has reached target_loss={self._loss:g}")
        targets = [target for target in (self._accuracy, self._loss) if target is not None]
        return bool(targets) and len(self._reached) == len(targets)


class DivergedError(RunError):
    """No client's update was usable for too long, so that more rounds would train nothing."""


class LostRounds(Callback):
    """Ends a run after five rounds in a row without a usable update; warns at the end if it lost fewer rounds.

    Args:
        rounds: of the run; a shorter run ends when all of its rounds were lost.
        note: ends the warning.
        lines: metrics of the rounds that an earlier process finished. After five lost ones, one more ends the run.

    Raises:
        DivergedError: all rounds are finished, and the last ones were lost.
    """

    def __init__(
        self, rounds: int, note: str = "metrics.jsonl says why", lines: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._note = note
        self._limit, self._in_a_row, self._lost, self._rounds = min(MOST_LOST, rounds), 0, 0, 0
        for line in lines:
            self._count(line)
        if self._rounds < rounds:
            self._in_a_row = min(self._in_a_row, self._limit - 1)
        self._check()

    def after_round(self, done: FinishedRound) -> None:
        """Count a round.

        Raises:
            DivergedError: the limit is reached.
        """
        self._count(done.metrics)
        self._check()
        if self._lost and (done.last or done.interrupted):
            log.warning("%d of %d rounds had no update; %s", self._lost, self._rounds, self._note)

    def _count(self, metrics: Mapping[str, Any]) -> None:
        lost = is_lost(metrics)
        self._rounds, self._lost, self._in_a_row = self._rounds + 1, self._lost + lost, (self._in_a_row + 1) * lost

    def _check(self) -> None:
        if self._in_a_row >= self._limit:
            raise DivergedError(
                f"no client's update could be used in {self._limit} rounds in a row; metrics.jsonl gives the reasons "
                "under failures. If the training diverged, lower the learning rates or local.clip, and run it again"
            )


class Interruption(Callback):
    """Records a request to stop, for the callbacks that follow."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def after_round(self, done: FinishedRound) -> None:
        """Record the request."""
        done.interrupted = self._request.signal is not None
