"""When a run ends before its last round: the accuracy aimed at is reached, or has not risen for too long."""

from collections.abc import Iterable, Mapping
from typing import Any

from train.config import Config


class EarlyStop:
    """Watches the test accuracy.

    Args:
        config: says what is aimed at, and how long to wait.
        lines: of the rounds that an earlier process has finished.
    """

    def __init__(self, config: Config, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._target, self._patience = config.target_accuracy, config.patience
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
        if self._target is not None and accuracy >= self._target:
            return f"test accuracy {100 * accuracy:.1f} % has reached target_accuracy={self._target:g}"
        if self._patience is not None and self._waited >= self._patience:
            return f"no better test accuracy in patience={self._patience} evaluations"
        return None
