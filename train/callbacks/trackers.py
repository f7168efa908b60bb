"""Trackers: Weights & Biases, if enabled, and custom callbacks. A tracker that fails does not end the run."""

import logging
from collections.abc import Callable

from sharding.errors import UserError
from train.callbacks.base import Callback, FinishedRound
from train.config.schema import Config

log = logging.getLogger(__name__)


class Guarded(Callback):
    """A callback whose failure does not end the run: it is logged once, and the callback is not called again."""

    def __init__(self, name: str, callback: Callback) -> None:
        self._name, self._callback = name, callback
        self._works = True

    def after_round(self, done: FinishedRound) -> None:
        """Pass the round on."""
        self._try(lambda: self._callback.after_round(done))

    def close(self, failed: bool = False) -> None:
        """Close it, if it still works."""
        self._try(lambda: self._callback.close(failed))

    def _try(self, call: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:
            self._works = False
            log.warning("%s failed and is skipped from now on; metrics.jsonl has all numbers: %s", self._name, error)
            log.debug("%s failed", self._name, exc_info=True)


def open_trackers(config: Config) -> list[Callback]:
    """Return the trackers of a configuration.

    Raises:
        UserError: W&B refuses.
    """
    return [Guarded(tracker.name, tracker.build(config)) for tracker in config.tracker]


def check_trackers(config: Config) -> None:
    """Check that W&B has a key, before any data are read.

    Raises:
        UserError: it has none.
    """
    if any(tracker.name == "wandb" and tracker.options["mode"] == "online" for tracker in config.tracker):
        import wandb  # noqa: PLC0415  # an extra, imported where used

        if not wandb.login(prompt=False, verify=False):
            raise UserError("W&B: no API key is configured; run `wandb login`, or set tracker.mode=offline")
