"""Trackers: Weights & Biases, if enabled, and custom callbacks. A tracker that fails does not end the run."""

import logging
from collections.abc import Callable

from sharding.errors import UserError, pick
from train.callbacks.base import Callback, FinishedRound
from train.config.schema import Config

log = logging.getLogger(__name__)

TRACKERS: dict[str, Callable[[Config], Callback]] = {}  # custom ones, by the names that `tracking.use` lists


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
    """Return the trackers that a configuration enables.

    Raises:
        UserError: an unknown name, or W&B refuses.
    """
    makers = [(name, pick(TRACKERS, name, "tracker")) for name in config.tracking.use]
    if config.tracking.wandb != "disabled":
        from train.callbacks.wandb_run import WandbRun  # noqa: PLC0415  # needs an extra

        makers.insert(0, ("wandb", WandbRun))
    return [Guarded(name, make(config)) for name, make in makers]


def check_trackers(config: Config) -> None:
    """Check that the enabled trackers exist, before any data are read.

    Raises:
        UserError: a package that is not installed, no key for W&B, an unknown name.
    """
    if config.tracking.use and not TRACKERS:
        raise UserError(f"no tracker {config.tracking.use[0]!r} is registered; import its module with --import MODULE")
    for name in config.tracking.use:
        pick(TRACKERS, name, "tracker")
    if config.tracking.wandb != "disabled":
        try:
            import wandb  # noqa: PLC0415  # an extra, imported where used
        except ImportError as error:
            raise UserError("tracking.wandb needs the package wandb: pip install 'wandb>=0.31'") from error
        if config.tracking.wandb == "online" and not wandb.login(prompt=False, verify=False):
            raise UserError("W&B: no API key is configured; run `wandb login`, or set tracking.wandb=offline")
