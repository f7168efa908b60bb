"""What a run writes: metrics of each round, the strategy's decisions, checkpoints, and the best model so far."""

import json
import os
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from train.callbacks.base import Callback, FinishedRound
from train.config.schema import Config
from train.experiment import Experiment
from train.multi_model import MultiModel
from train.rundir.checkpoint import Checkpoint, Keeper, save_checkpoint
from train.rundir.files import BEST_FILE, LAYERS_FILE, METRICS_FILE
from train.rundir.model_file import save_model
from train.rundir.records import append_layers, records_layers
from train.runtime.errors import writing
from train.runtime.files import sync_folder
from train.runtime.jsonl import best_accuracy


class MetricsFile(Callback):
    """Appends one JSON object for each round; NaN and infinities, which JSON lacks, become null.

    Raises:
        RunError: the disk is full or not writable.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path, self._layers = (config.directory / name for name in (METRICS_FILE, LAYERS_FILE))
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
            sync_folder(self._path.parent)

    def after_round(self, done: FinishedRound) -> None:
        """Write the round, so that its metrics are on disk before the next round starts."""
        if records_layers(self._config, done.number, done.last):
            for task, layers in done.layers.items():
                with writing(self._layers):
                    append_layers(self._layers, done.number, task, layers)
        clean = {
            key: None if isinstance(value, float) and not isfinite(value) else value
            for key, value in done.metrics.items()
        }
        line = (json.dumps(clean) + "\n").encode()
        with writing(self._path):
            while line:  # an unbuffered file may write only a part
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


class SaveCheckpoints(Callback):
    """Writes a checkpoint every `checkpoint_every` rounds, after the last round, and when the run is interrupted.

    It runs before `MetricsFile`, so that the run can resume from every round in `metrics.jsonl`.
    """

    def __init__(self, experiment: Experiment | MultiModel) -> None:
        self._experiment, self._config = experiment, experiment.config

    def after_round(self, done: FinishedRound) -> None:
        """Write the checkpoint if it is due.

        Raises:
            RunError: the disk is full or not writable.
        """
        rounds = done.number + 1
        if done.last or done.interrupted or rounds % self._config.checkpoint_every == 0:
            its = self._experiment
            save_checkpoint(
                self._config.directory, Checkpoint.of(its.model, rounds, its.sampler, keepers_of(its.parts))
            )


class SaveBest(Callback):
    """Writes the evaluated model whenever its test accuracy is the best so far.

    With `data.holdout` the test accuracy is that on the held-out samples.

    Args:
        experiment: whose model is evaluated.
        lines: metrics of the rounds that an earlier process finished.
    """

    def __init__(self, experiment: Experiment | MultiModel, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._experiment = experiment
        self._best = best_accuracy(lines)

    def after_round(self, done: FinishedRound) -> None:
        """Write the model if it is the best so far.

        Raises:
            RunError: the disk is full or not writable.
        """
        accuracy = done.metrics.get("test_accuracy")
        if isinstance(accuracy, float) and accuracy > self._best:
            self._best = accuracy
            its = self._experiment
            save_model(its.config.directory / BEST_FILE, its.result, done.number + 1, its.parts)


def keepers_of(parts: Mapping[str, Experiment]) -> dict[str, Keeper]:
    """Return the servers' optimizers and averages, which a checkpoint stores with the models and the sampler."""
    optimizers: dict[str, Keeper] = {f"server/{name}": part.server.optimizer for name, part in parts.items()}
    averages = {f"average/{name}": part.server.averaged for name, part in parts.items()}
    return optimizers | {place: average for place, average in averages.items() if average is not None}
