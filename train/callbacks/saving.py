"""What a run writes: metrics of each round, the strategy's decisions, checkpoints, and the best model so far."""

import json
import os
from math import isfinite
from time import monotonic

from train.callbacks.callback import Callback, Plans
from train.config.schema import Config
from train.experiment.experiment import Experiments
from train.experiment.history import History
from train.experiment.metrics import RoundMetrics
from train.rundir.checkpoint import Checkpoint, Stateful, save_checkpoint
from train.rundir.file_names import BEST_FILE, LAYERS_FILE, METRICS_FILE
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
            for name, layers in layer_statistics(self._config, plan).items():
                with writing(self._layers):
                    append_layers(self._layers, metrics.round, name, layers)
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
    """

    def __init__(self, experiment: Experiments) -> None:
        self._experiment, self._every = experiment, experiment.config.checkpoint_every
        self._saved_at = monotonic()
        self._unsaved: int | None = None  # finished rounds, if the last one has no checkpoint

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Write the checkpoint if it is due.

        Raises:
            RunError: the disk is full or not writable.
        """
        self._unsaved = metrics.round + 1
        if self._unsaved % self._every == 0 or monotonic() - self._saved_at >= AT_MOST:
            self.save()

    def save(self) -> None:
        """Write the checkpoint of the last finished round, if there is none.

        Raises:
            RunError: the disk is full or not writable.
        """
        if self._unsaved is not None:
            experiment = self._experiment
            checkpoint = Checkpoint.of(experiment.model, self._unsaved, states_of(experiment))
            save_checkpoint(experiment.config.directory, checkpoint)
            self._unsaved, self._saved_at = None, monotonic()


class SaveBest(Callback):
    """Writes the evaluated model whenever its test accuracy is the best so far.

    With `data.holdout` the test accuracy is that on the held-out samples.

    Args:
        experiment: whose model is evaluated.
        history: of the run; it has completed a round's metrics before callbacks see them.
    """

    def __init__(self, experiment: Experiments, history: History) -> None:
        self._experiment, self._history = experiment, history

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Write the model if it is the best so far.

        Raises:
            RunError: the disk is full or not writable.
        """
        if self._history.improved:
            experiment = self._experiment
            path = experiment.config.directory / BEST_FILE
            save_model(path, experiment.result, metrics.round + 1, experiment.parts)


def states_of(experiment: Experiments) -> dict[str, Stateful]:
    """Return what a checkpoint stores with the models: the servers' optimizers and averages, and the sampler."""
    return {f"server/{name}": one.server for name, one in experiment.parts.items()} | {"sampler": experiment.sampler}
