"""One training run, from its configuration to its directory of results."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from sharding.errors import UserError
from train.checkpoint import drop_rounds_from, load_checkpoint, save_checkpoint
from train.config import Config, check_config
from train.engines.post import Gloo, Mailbox
from train.engines.workers import serve
from train.experiment import Experiment, assemble
from train.provenance import PROVENANCE_FILE, Provenance, describe_start, keep_device
from train.records import CLIENTS_FILE, describe_clients
from train.rounds import Metrics, run_rounds
from train.tasks import Tasks, assemble_tasks, run_tasks
from train.tracking import Trackers, check_trackers

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"


def run(config: Config, progress: Callable[[Metrics], None], resume: bool = False) -> Path:
    """Train as configured and return the directory with `config.yaml`, `metrics.jsonl` and `model.safetensors`.

    Args:
        config: of the run.
        progress: is handed each round's metrics.
        resume: go on with the run that the directory holds, from its last checkpoint.

    Raises:
        UserError: the directory holds a run already (or another one, on resuming), or a part cannot be built.
    """
    check_directory(config, resume)
    check_trackers(config)
    if resume and is_finished(config):
        return config.directory
    held = Provenance.read(config.directory) if resume else None
    local = keep_device(config, held)
    torch.set_num_threads(config.threads)
    experiment = assemble_tasks(local) if config.tasks else assemble(local)  # before anything is written
    for name, part in experiment.parts.items():
        part.open(held.choices.get(name) if held else None)
    start = _open_directory(config.directory, experiment)
    made = held.resumed(describe_start(start)) if held else Provenance.of(config, experiment.parts, start)
    (config.directory / PROVENANCE_FILE).write_text(made.to_json(), encoding="utf-8")

    def record(t: int, metrics: Metrics) -> None:
        trackers.log(metrics)
        if "test_accuracy" in metrics:
            save_checkpoint(config.directory, experiment.model, t + 1, experiment.sampler)
        progress(metrics)

    try:
        with Trackers(config) as trackers:
            _describe(config, experiment)
            for name, part in experiment.parts.items():
                part.observers.append(trackers.observe(name))
            if isinstance(experiment, Tasks):
                run_tasks(experiment, start, record)
            else:
                run_rounds(experiment, start, record)
    finally:
        experiment.close()
    return config.directory


def follow(config: Config) -> None:
    """Train what the process of rank 0 asks for, and write nothing."""
    if config.tasks:
        assemble_tasks(config)  # says why not
    torch.set_num_threads(config.threads)
    serve(assemble(config).job, Gloo(0), Mailbox())


def check_directory(config: Config, resume: bool) -> None:
    """Make sure that nothing will be overwritten.

    Raises:
        UserError: the directory holds a run and `resume` is off, or a run of another configuration and it is on.
    """
    directory = config.directory
    if not (directory / METRICS_FILE).exists() and not (directory / CONFIG_FILE).exists():
        return
    if not resume:
        raise UserError(f"{directory} already holds a run; choose another with output=…, or go on with it by --resume")
    # Checked as a config, so that keys that did not exist then count with their defaults.
    held = _plain(check_config(yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))))
    wanted = _plain(config)
    differing = [key for key in wanted if held[key] != wanted[key]]
    if differing:
        key = differing[0]
        raise UserError(f"{directory} holds a run with {key}={held[key]}, not {wanted[key]}; choose another output=…")


def _describe(config: Config, experiment: Experiment | Tasks) -> None:
    """Write the configuration, and who has what."""
    text = yaml.safe_dump(_plain(config), sort_keys=False)
    (config.directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    (config.directory / CLIENTS_FILE).write_text(json.dumps(describe_clients(experiment.parts)), encoding="utf-8")


def is_finished(config: Config) -> bool:
    """Return whether the run's directory holds all its rounds."""
    path = config.directory / METRICS_FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.endswith("\n") and text.count("\n") == config.rounds  # a line a round


def _open_directory(directory: Path, experiment: Experiment | Tasks) -> int:
    """Make the directory, load what an earlier run left there, and return the round to start with.

    Raises:
        UserError: the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {directory}: {error.strerror}; choose another output=…") from error
    start = load_checkpoint(directory, experiment.model, experiment.sampler)
    drop_rounds_from(directory / METRICS_FILE, start)
    return start


def _plain(config: Config) -> dict[str, object]:
    return config.model_dump(mode="json", exclude={"output"})
