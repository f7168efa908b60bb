"""Write the model to disk: a checkpoint every few rounds, and the best model so far."""

from collections.abc import Iterable, Mapping
from typing import Any

from train.callbacks.base import Callback, FinishedRound
from train.experiment import Experiment
from train.multi_model import MultiModel
from train.rundir.checkpoint import Checkpoint, Keeper, save_checkpoint
from train.rundir.files import BEST_FILE
from train.rundir.model_file import save_model


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
        self._best = max((line["test_accuracy"] for line in lines if "test_accuracy" in line), default=-1.0)

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
