"""Accumulate over a run's rounds: bytes, the best accuracy, and whether the targets are reached."""

from collections.abc import Iterable
from typing import Any

from train.config.schema import Config
from train.experiment.budget import Account
from train.experiment.metrics import RoundMetrics


class History:
    """What a run has reached so far, which completes each round's metrics.

    A run ends once it has reached its target accuracy and loss. With held-out samples the test accuracy is that on
    these.

    Args:
        config: sets the targets.
        rounds: metrics of the rounds that an earlier process finished.
        account: the account of a run with privacy; by default one without a release.

    Attributes:
        improved: whether the last round has a better test accuracy than all before.
        stopped: why the run ends with the last round; None if it does not.
    """

    def __init__(self, config: Config, rounds: Iterable[RoundMetrics] = (), account: Account | None = None) -> None:
        self._config = config
        self._account = None if config.privacy is None else account or Account(config)
        self._target_accuracy, self._target_loss = config.target_accuracy, config.target_loss
        self._bytes, self._best, self.improved = 0, -1.0, False
        self.stopped: str | None = None
        self._reached: dict[str, str] = {}
        for metrics in rounds:
            self.complete(metrics)

    def evaluates(self, t: int) -> bool:
        """Return whether round t is evaluated: as configured, and where the budget of ε ends the run."""
        return self._config.evaluates(t) or (self._account is not None and self._account.ends_with(t))

    def complete(self, metrics: RoundMetrics, release: str = "") -> dict[str, Any]:
        """Return `bytes_total`, `best_accuracy`, `epsilon` and `stopped` of the next round; raise as `Account.add`.

        `release` is that of a round with privacy that has just run, see `Outcome.release`.
        """
        self._bytes += metrics.bytes_down + metrics.bytes_up
        self.improved, self.stopped, epsilon = False, metrics.stopped, metrics.epsilon
        if (accuracy := metrics.test_accuracy) is not None:
            self.improved = accuracy > self._best
            self._best = max(self._best, accuracy)
            self.stopped = self._reason_to_stop(accuracy, metrics.train_set_loss)
        privacy = self._config.privacy
        if privacy is not None and self._account is not None and release:
            self._account.add(metrics.round, release)
            epsilon = self._account.epsilon
            if self._account.ends_with(metrics.round) and metrics.round + 1 < self._config.rounds:
                self.stopped = f"another round would spend more than privacy.max_epsilon={privacy.max_epsilon:g}"
        best = self._best if self._best >= 0 else None
        return {"bytes_total": self._bytes, "best_accuracy": best, "epsilon": epsilon, "stopped": self.stopped}

    def _reason_to_stop(self, accuracy: float, loss: float | None) -> str | None:
        """Record targets reached for the first time; return why the run ends with this round, if it does."""
        if self._target_accuracy is not None and accuracy >= self._target_accuracy:
            reached = f"test accuracy {100 * accuracy:.1f} % has reached target_accuracy={self._target_accuracy:g}"
            self._reached.setdefault("accuracy", reached)
        if self._target_loss is not None and loss is not None and loss <= self._target_loss:
            self._reached.setdefault("loss", f"training loss {loss:.4g} has reached target_loss={self._target_loss:g}")
        targets = [target for target in (self._target_accuracy, self._target_loss) if target is not None]
        if targets and len(self._reached) == len(targets):
            return " and ".join(self._reached.values())
        return None
