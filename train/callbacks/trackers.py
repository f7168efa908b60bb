"""Trackers: Weights & Biases, if enabled, and custom callbacks. A tracker that fails does not end the run."""

import logging
from collections.abc import Callable

from sharding.errors import UserError
from train.callbacks.callback import Callback, Plans
from train.config.schema import Config
from train.experiment.experiment import Experiment
from train.experiment.metrics import RoundMetrics

log = logging.getLogger(__name__)


class Guarded(Callback):
    """A callback whose failure does not end the run: it is logged once, and the callback is not called again."""

    def __init__(self, name: str, callback: Callback) -> None:
        self._name, self._callback = name, callback
        self._works = True

    def before_training(self, experiment: Experiment) -> None:
        """Pass the experiment on."""
        self._try(lambda: self._callback.before_training(experiment))

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool | None:
        """Pass the round on."""
        return self._try(lambda: self._callback.after_round(metrics, plan))

    def close(self, failed: bool = False) -> None:
        """Close it, if it still works."""
        self._try(lambda: self._callback.close(failed))

    def _try(self, call: Callable[[], bool | None]) -> bool | None:
        if not self._works:
            return None
        try:
            return call()
        except Exception as error:
            self._works = False
            log.warning("%s failed and is skipped from now on; metrics.jsonl has all numbers: %s", self._name, error)
            log.debug("%s failed", self._name, exc_info=True)
            return None


def open_trackers(config: Config) -> list[Callback]:
    """Return the trackers of a configuration; raise a UserError if W&B refuses."""
    return [Guarded(tracker.name, tracker.build(config)) for tracker in config.tracker]


def check_trackers(config: Config) -> None:
    """Raise a UserError if W&B has no key, before any data are read."""
    if any(tracker.name == "wandb" and tracker.options["mode"] == "online" for tracker in config.tracker):
        import wandb  # noqa: PLC0415  # an extra, imported where used

        if not wandb.login(prompt=False, verify=False):
            raise UserError("W&B: no API key is configured; run `wandb login`, or set tracker.mode=offline")
