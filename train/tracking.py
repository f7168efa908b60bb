"""Where metrics go: always a JSONL file, Weights & Biases when asked, and trackers of one's own."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Self

from sharding import Plan
from sharding.errors import UserError, pick
from train.config import Config
from train.failures import writing
from train.files import sync_folder
from train.records import LAYERS_FILE, Layers, append_layers, laws_of

log = logging.getLogger(__name__)


class Tracker:
    """Takes what a run tells; a tracker of one's own overrides what it is interested in."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one round's metrics, flat."""

    def log_layers(self, round: int, task: str, layers: Layers) -> None:
        """Record what the strategy decided for each layer, in the rounds of `tracking.layers_every`."""

    def close(self, failed: bool = False) -> None:
        """Flush and let go; `failed` where the run was interrupted or broke off."""


class JsonlTracker(Tracker):
    """Appends one JSON object a line; NaN and infinities, which JSON has not, become null."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)
            sync_folder(path.parent)
        self._layers = path.with_name(LAYERS_FILE)

    def log(self, metrics: dict[str, Any]) -> None:
        """Write one line, and have it on disk before the next round.

        Raises:
            RunError: the disk is full, or takes no writing.
        """
        clean = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in metrics.items()
        }
        line = (json.dumps(clean) + "\n").encode()
        with writing(self._path):
            while line:  # a file that is not buffered may take less than all
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())

    def log_layers(self, round: int, task: str, layers: Layers) -> None:
        """Append to `layers.jsonl`."""
        with writing(self._layers):
            append_layers(self._layers, round, task, layers)

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


class Guarded(Tracker):
    """A tracker that may fail without harm: it is told of once, and then left alone."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._works = True

    def log(self, metrics: dict[str, Any]) -> None:
        """Hand the metrics on."""
        self._try(lambda: self._tracker.log(metrics))

    def log_layers(self, round: int, task: str, layers: Layers) -> None:
        """Hand the laws on."""
        self._try(lambda: self._tracker.log_layers(round, task, layers))

    def close(self, failed: bool = False) -> None:
        """Have it closed, if it still works."""
        self._try(lambda: self._tracker.close(failed))

    def _try(self, call: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:
            self._works = False
            log.warning("%s failed and is left out from now on; metrics.jsonl has all: %s", self._name, error)
            log.debug("%s failed", self._name, exc_info=True)


TRACKERS: dict[str, Callable[[Config], Tracker]] = {}  # one's own, by the names that `tracking.use` may list


class Trackers(Tracker):
    """All trackers of a run; the file first, so that no other can keep a round from it.

    Raises:
        UserError: one of them cannot be had.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        others = [(name, pick(TRACKERS, name, "tracker")) for name in config.tracking.use]
        if config.tracking.wandb != "disabled":
            from train.wandb_run import WandbTracker  # noqa: PLC0415  # needs an extra

            others.insert(0, ("wandb", WandbTracker))
        guarded = [Guarded(name, make(config)) for name, make in others]
        self._all: Sequence[Tracker] = [JsonlTracker(config.directory / "metrics.jsonl"), *guarded]

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one round with each."""
        for tracker in self._all:
            tracker.log(metrics)

    def log_layers(self, round: int, task: str, layers: Layers) -> None:
        """Record the layers with each."""
        for tracker in self._all:
            tracker.log_layers(round, task, layers)

    def close(self, failed: bool = False) -> None:
        """Close each."""
        for tracker in self._all:
            tracker.close(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def observe(self, task: str) -> Callable[[int, Plan], None]:
        """Return what looks at a task's plans, in the first and the last round and those of `layers_every`."""
        rounds, every = self._config.rounds, self._config.tracking.layers_every

        def look(round: int, plan: Plan) -> None:
            wanted = round in (0, rounds - 1) or (every is not None and (round + 1) % every == 0)
            if wanted and plan.spectra:
                self.log_layers(round, task, laws_of(plan))

        return look


def check_trackers(config: Config) -> None:
    """Make sure that the trackers asked for can be had, before anything takes its time.

    Raises:
        UserError: a package that is not installed, an unknown name.
    """
    for name in config.tracking.use:
        pick(TRACKERS, name, "tracker")
    if config.tracking.wandb != "disabled":
        try:
            import wandb  # noqa: F401, PLC0415  # an extra, imported where used
        except ImportError as error:
            raise UserError("tracking.wandb needs the package wandb: pip install 'wandb>=0.18'") from error


def totals(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return (MB moved so far, best test accuracy so far) of a run's lines; −1 before any evaluation."""
    moved = sum((line["bytes_down"] + line["bytes_up"]) / 1e6 for line in lines)
    return moved, max((line["test_accuracy"] for line in lines if "test_accuracy" in line), default=-1.0)
