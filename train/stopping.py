"""When a run ends before its last round: what is aimed at is reached, or the accuracy has not risen for too long."""

from collections.abc import Iterable, Mapping
from typing import Any

from train.config import Config


class EarlyStop:
    """Watches the test accuracy, and the training loss where that is a target.

    Args:
        config: says what is aimed at, and how long to wait.
        lines: of the rounds that an earlier process has finished.
    """

    def __init__(self, config: Config, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._accuracy, self._loss, self._patience = config.target_accuracy, config.target_loss, config.patience
        self._reached: dict[str, str] = {}
        self._best, self._waited = -1.0, 0
        for line in lines:
            self.reason(line)

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
        """Note what is reached for the first time; return whether all that is aimed at has been."""
        if self._accuracy is not None and accuracy >= self._accuracy:
            told = f"test accuracy {100 * accuracy:.1f} % has reached target_accuracy={self._accuracy:g}"
            self._reached.setdefault("accuracy", told)
        if self._loss is not None and loss is not None and loss <= self._loss:
            self._reached.setdefault("loss", f"training loss {loss:.4g} has reached target_loss={self._loss:g}")
        aims = [aim for aim in (self._accuracy, self._loss) if aim is not None]
        return bool(aims) and len(self._reached) == len(aims)
