"""What a run writes: metrics of each round, the strategy's decisions, checkpoints, and the best model so far."""

import json
import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from time import monotonic

from torch import nn

from train.callbacks.callback import Callback, Plans
from train.config.schema import Config
from train.experiment.experiment import Experiment
from train.experiment.history import History
from train.experiment.metrics import RoundMetrics
from train.rundir.checkpoint import Checkpoint, Stateful, save_checkpoint
from train.rundir.file_names import LAYERS_FILE, METRICS_FILE
from train.rundir.model_file import save_model
from train.rundir.records import append_layers, layer_statistics, records_layers
from train.utils.errors import writing
from train.utils.files import sync_folder

AT_MOST = 60.0  # seconds between checkpoints, plus the round under way


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

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Write the round, so that its metrics are on disk before the next round starts."""
        if records_layers(self._config, metrics):
            with writing(self._layers):
                append_layers(self._layers, metrics.round, layer_statistics(plan))
        clean = {
            key: None if isinstance(value, float) and not isfinite(value) else value
            for key, value in metrics.to_dict().items()
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
    """Writes a checkpoint every `checkpoint_every` rounds, or after the first round that ends a minute after the last.

    `save` writes one of the last round, if it has none. A process that dies between two checkpoints loses the rounds
    since the first: they are run again, with the same result.

    Args:
        config: the configuration of the run.
        model: the model that is trained; several models are one module.
        states: the states that a checkpoint has besides the model, as from `states_of`.
    """

    def __init__(self, config: Config, model: nn.Module, states: Mapping[str, Stateful]) -> None:
        self._config, self._model, self._states = config, model, states
        self._saved_at = monotonic()
        self._unsaved: int | None = None  # finished rounds, if the last one has no checkpoint

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Write the checkpoint if it is due; raise a RunError if the disk is full or not writable."""
        self._unsaved = metrics.round + 1
        if self._unsaved % self._config.checkpoint_every == 0 or monotonic() - self._saved_at >= AT_MOST:
            self.save()

    def save(self) -> None:
        """Write the checkpoint of the last finished round, if there is none; the errors are those of `after_round`."""
        if self._unsaved is not None:
            checkpoint = Checkpoint.of(self._model, self._unsaved, self._states)
            save_checkpoint(self._config.directory, checkpoint)
            self._unsaved, self._saved_at = None, monotonic()


class SaveBest(Callback):
    """Writes the evaluated model whenever its test accuracy is the best so far.

    With `data.holdout` the test accuracy is that on the held-out samples.

    Args:
        path: the path of the file.
        model: the model that is evaluated; several models are one module.
        experiments: the experiments of each model.
        history: the history of the run; it has completed a round's metrics before callbacks see them.
    """

    def __init__(self, path: Path, model: nn.Module, experiments: Sequence[Experiment], history: History) -> None:
        self._path, self._model, self._experiments, self._history = path, model, experiments, history

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Write the model if it is the best so far; raise a RunError if the disk is full or not writable."""
        if self._history.improved:
            save_model(self._path, self._model, metrics.round + 1, self._experiments)


def states_of(experiments: Sequence[Experiment]) -> dict[str, Stateful]:
    """Return what a checkpoint stores with the models: the servers' optimizers and averages, and the one sampler."""
    return {f"server/{one.config.name}": one.server for one in experiments} | {"sampler": experiments[0].sampler}
