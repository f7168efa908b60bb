"""When a run ends before its last round: a target is reached, the accuracy stalls, or all updates are lost."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from train.callbacks.base import Callback, FinishedRound
from train.config.schema import Config
from train.runtime.errors import RunError

log = logging.getLogger(__name__)

MOST_LOST = 5  # rounds in a row without any usable update, after which a run ends


class EarlyStop(Callback):
    """Ends the run at its target accuracy or loss, or when the test accuracy has not risen for too long.

    Args:
        config: names the targets and the patience.
        lines: metrics of the rounds that an earlier process has finished.
    """

    def __init__(self, config: Config, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._accuracy, self._loss, self._patience = config.target_accuracy, config.target_loss, config.patience
        self._reached: dict[str, str] = {}
        self._best, self._waited = -1.0, 0
        for line in lines:
            self.reason(line)

    def after_round(self, done: FinishedRound) -> None:
        """End the run where there is a reason, which `metrics["stopped"]` then says."""
        if (why := self.reason(done.metrics)) is not None:
            done.metrics["stopped"], done.last = why, True

    def reason(self, metrics: Mapping[str, Any]) -> str | None:
        """Take in a round's metrics, and return why the run ends with it, if it does."""
        accuracy = metrics.get("test_accuracy")
        if accuracy is None:
            return None
        self._waited = 0 if accuracy > self._best else self._waited + 1
        self._best = max(self._best, accuracy)
        if self._reaches_all(accuracy, metrics.get("train_set_loss")):
            return " and ".join(self._reached.values())
        if self._patience is not None and self._waited >= self._patience:
            return f"no better test accuracy in patience={self._patience} evaluations"
        return None

    def _reaches_all(self, accuracy: float, loss: float | None) -> bool:
        """Note which targets are reached for the first time; return whether all are."""
        if self._accuracy is not None and accuracy >= self._accuracy:
            reached = f"test accuracy {100 * accuracy:.1f} % has reached target_accuracy={self._accuracy:g}"
            self._reached.setdefault("accuracy", reached)
        if self._loss is not None and loss is not None and loss <= self._loss:
            self._reached.setdefault("loss", f"training loss {loss:.4g} has reached target_loss={self._loss:g}")
        targets = [target for target in (self._accuracy, self._loss) if target is not None]
        return bool(targets) and len(self._reached) == len(targets)


class DivergedError(RunError):
    """No client's update could be used for too long: more rounds would train nothing."""


class LostRounds(Callback):
    """Ends a run after five rounds in a row in which every update had to be left out; warns at the end of fewer.

    Args:
        rounds: of the run; a shorter one ends when all of its rounds were lost.
        note: ends the warning.
    """

    def __init__(self, rounds: int, note: str = "metrics.jsonl says why") -> None:
        self._note = note
        self._limit, self._in_a_row, self._lost, self._rounds = min(MOST_LOST, rounds), 0, 0, 0

    def after_round(self, done: FinishedRound) -> None:
        """Count a round.

        Raises:
            DivergedError: it was one too many.
        """
        lost = bool(done.metrics["failed"]) and not done.metrics["heard"]
        self._rounds, self._lost, self._in_a_row = self._rounds + 1, self._lost + lost, (self._in_a_row + 1) * lost
        if self._in_a_row == self._limit:
            raise DivergedError(
                f"no client's update could be used in {self._limit} rounds in a row; metrics.jsonl says why, under "
                "failures. Where the training diverged, lower local.lr, server_lr or clip, and run it again"
            )
        if self._lost and (done.last or done.interrupted):
            log.warning("%d of %d rounds had no update; %s", self._lost, self._rounds, self._note)


class Interruption(Callback):
    """Notes a request to stop, for the callbacks that come after it.

    Args:
        asked: whether there is one.
    """

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def after_round(self, done: FinishedRound) -> None:
        """Note it."""
        done.interrupted = self._asked()
