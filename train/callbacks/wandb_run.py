"""Weights & Biases: a run is one W&B run, however often it is resumed.

`wandb.json` in the run's directory keeps the run's id, how many rounds were logged, so that rounds that are run again
are not logged twice, and where the run is. Offline needs no account: `wandb sync DIR/wandb/offline-run-*` uploads it.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import wandb

from sharding.errors import UserError, safe_repr
from sharding.validation import is_number
from train.callbacks.callback import Callback, Plans
from train.config.naming import settings_in_name
from train.config.schema import Config
from train.experiment.metrics import RoundMetrics
from train.report.page import write_page
from train.report.summary import write_report
from train.rundir.file_names import ARTIFACTS, CONFIG_FILE, WANDB_FILE
from train.rundir.provenance import describe_start
from train.rundir.records import Layers, layer_statistics, records_layers, wandb_state
from train.utils.files import write_atomically
from train.utils.stages import set_stage

log = logging.getLogger(__name__)

LONGEST_TAG = 64
BEST = {"test_accuracy": "max", "train_set_accuracy": "max", "test_loss": "min", "train_loss": "min"}


class WandbRun(Callback):
    """Logs all numbers of a round and histograms of the layers' probabilities.

    With `data.holdout` the model is evaluated on held-out samples: their ``test_…`` is logged as ``val_…``.

    Args:
        config: the configuration of the run.
        mode: ``online`` or ``offline``.
        project: the project of W&B.
        entity: the entity of W&B; default: the user's own.
        group: the group of the run; default: name, strategy and overridden settings, so that seeds share a group.
        run_name: the name of the run in W&B; default: the name of its directory.
        tags: tags besides the strategy, the dataset and the overridden settings.
        artifacts: whether to upload the run's files.

    Raises:
        UserError: W&B refuses the run.
    """

    def __init__(
        self,
        config: Config,
        *,
        mode: Literal["online", "offline"] = "online",
        project: str = "spectral-sharding",
        entity: str | None = None,
        group: str | None = None,
        run_name: str | None = None,
        tags: Sequence[str] = (),
        artifacts: bool = False,
    ) -> None:
        self._config, self._state, self._artifacts = config, config.directory / WANDB_FILE, artifacts
        state = wandb_state(config.directory)
        if self._state.exists() and not state:
            log.warning("%s cannot be read; W&B gets a new run that starts with this round", self._state)
        self._id, self._num_logged = state.get("id") or uuid4().hex[:12], int(state.get("rounds", 0))
        if wrong := [tag for tag in tags if not 0 < len(tag.strip()) <= LONGEST_TAG]:
            raise UserError(f"tracker.tags has {safe_repr(wrong[0])}; W&B takes tags of 1 to {LONGEST_TAG} characters")
        settings = settings_in_name(config)
        settings_tags = [word[:LONGEST_TAG] for word in settings.split(",") if word]
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                group=group or "-".join(filter(None, (config.name, config.strategy, settings))),
                job_type=config.strategy,
                tags=[config.strategy, config.data.name, *settings_tags, *tags],
                name=run_name or config.directory.name,
                id=self._id,
                resume="allow" if state and mode == "online" else None,
                dir=config.directory,
                mode=mode,
                config=config.model_dump(mode="json") | {"versions": describe_start(self._num_logged)},
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.Error, ValueError) as error:
            remedy = "; tracker.mode=offline needs no account" if mode == "online" else ""
            raise UserError(f"W&B: {' '.join(str(error).split())}{remedy}") from error
        self._where = self._run.url or f"wandb sync {Path(self._run.dir).parent}"
        self._save_state()
        self._define()
        set_stage(f"logging to W&B, {mode}: {self._where}")

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Log the numbers of one round, with the round as the step."""
        if metrics.round < self._num_logged:
            return
        numbers = {self._named(key): value for key, value in metrics.to_dict().items() if is_number(value)}
        numbers["megabytes"] = metrics.bytes_total / 1e6
        if metrics.best_accuracy is not None:
            numbers[self._named("best_test_accuracy")] = numbers.pop("best_accuracy")
        layers = self._histograms(layer_statistics(plan)) if records_layers(self._config, metrics) else {}
        self._run.log(numbers | layers, step=metrics.round)
        self._num_logged = metrics.round + 1
        self._save_state()
        for client, reason in (metrics.failures or {}).items():
            self._run.summary[f"failures/{metrics.round}/{client}"] = reason

    def _histograms(self, layers: Layers) -> dict[str, Any]:
        """Return histograms of λ, π and ω, and the ANME, of each layer."""
        histograms: dict[str, Any] = {}
        for name, entries in layers.items():
            for entry in entries:
                layer = name + (f"/r={entry.keep_ratio:g}" if len(entries) > 1 else "")
                histograms[f"anme/{layer}"] = entry.anme
                for key, values, bounds in (
                    ("magnitudes", entry.magnitudes, None),
                    ("inclusion", entry.inclusion, (0, 1)),
                    ("multipliers", entry.multipliers, None),
                ):
                    histograms[f"{key}/{layer}"] = wandb.Histogram(np_histogram=np.histogram(values, 32, bounds))
        return histograms

    def close(self, failed: bool = False) -> None:
        """Finish the run, with exit code 1 if it was interrupted or failed."""
        if self._artifacts and not failed:
            self._run.log_artifact(self._artifact())
        self._run.finish(exit_code=int(failed))

    def _artifact(self) -> wandb.Artifact:
        """Return the run's files, with its summary, plots and page."""
        directory = self._config.directory
        artifact = wandb.Artifact(f"run-{self._id}", type="run")
        for name in ARTIFACTS:
            if (path := directory / name).exists():
                artifact.add_file(str(path))
        with TemporaryDirectory() as report:
            command = f"python -m train run {directory / CONFIG_FILE}"
            write_report([directory], Path(report), self._config.name, command)
            write_page([directory], Path(report), command)
            artifact.add_dir(report)
        return artifact

    def _named(self, key: str) -> str:
        """Return the W&B name of a metric: ``val_…`` instead of ``test_…`` if samples are held out."""
        return key if self._config.data.holdout is None else key.replace("test_", "val_")

    def _define(self) -> None:
        """Make rounds the axis, bytes the axis of the best accuracy, and keep the best of each in the summary."""
        self._run.define_metric("round")
        self._run.define_metric("megabytes", step_metric="round")
        self._run.define_metric("*", step_metric="round")
        self._run.define_metric(self._named("best_test_accuracy"), step_metric="megabytes", summary="max")
        for prefix in ("", *(f"{one.name}/" for one in self._config.models() if one is not self._config)):
            for name, best in BEST.items():
                self._run.define_metric(prefix + self._named(name), step_metric="round", summary=f"{best},last")

    def _save_state(self) -> None:
        state = {"id": self._id, "rounds": self._num_logged, "where": self._where}
        write_atomically(self._state, (json.dumps(state) + "\n").encode())
