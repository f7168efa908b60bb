"""Run one training, from its configuration to its directory of results."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from train.assembly import assemble
from train.callbacks import Callback, closing
from train.callbacks.files import MetricsFile, SaveBest, SaveCheckpoints, keepers_of
from train.callbacks.stopping import EarlyStop, Interruption, LostRounds
from train.callbacks.trackers import check_trackers, open_trackers
from train.config.schema import Config
from train.config.yaml_text import dump_yaml
from train.experiment import Experiment
from train.multi_model import MultiModel, assemble_models
from train.pilots import teach
from train.rounds import run_rounds
from train.rundir import files
from train.rundir.checkpoint import find_checkpoint
from train.rundir.directory import is_finished, open_directory, plain
from train.rundir.model_file import save_model
from train.rundir.provenance import Provenance, describe_start, keep_device
from train.rundir.records import Clients, check_clients, describe_clients
from train.runtime.files import write_whole
from train.runtime.jsonl import has_ended, keep_lines, read_lines
from train.runtime.signals import Request, stop_on_request
from train.runtime.stages import enter

log = logging.getLogger(__name__)

Build = Callable[[Config], Experiment | MultiModel]


def run(config: Config, callbacks: Sequence[Callback] = (), resume: bool = False, build: Build | None = None) -> Path:
    """Train as configured and return the directory with `config.yaml`, `metrics.jsonl` and `model.safetensors`.

    Args:
        config: of the run.
        callbacks: called after those that write the run's files, and closed at the end.
        resume: continue the run that the directory holds, from its last checkpoint; with more rounds where the schedule
            leaves the earlier ones unchanged.
        build: builds the parts of the run; a simulation by default.

    Raises:
        UserError: the directory holds a run already (or another one, on resuming), or a part cannot be built.
        RunError: the run cannot continue: a full disk, a worker that died, a training that diverged.
        Stopped: a signal asked to stop; the last finished round has a checkpoint.
    """
    check_trackers(config)
    with open_directory(config, resume), threads(config.threads):
        if not (resume and is_finished(config)):
            _train(config, callbacks, resume, build or (assemble_models if config.tasks else assemble))
    return config.directory


def _train(config: Config, callbacks: Sequence[Callback], resume: bool, build: Build) -> None:
    """Train in a directory that no other process writes to."""
    held = Provenance.read(config.directory) if resume else None
    experiment = build(keep_device(config, held))
    try:
        for part in experiment.parts.values():
            part.open()  # an error appears before anything is written
        clients = describe_clients(experiment.parts)
        if resume:
            check_clients(config.directory, clients)
        start, lines = _go_back(config, experiment) if resume else (0, [])
        _describe(config, experiment, clients, held, start)
        for part in experiment.parts.values():
            teach(part, config.directory)
        with (
            stop_on_request() as request,
            closing([*open_callbacks(experiment, lines, request), *callbacks]) as watching,
        ):
            enter("training its first round" if start == 0 else f"resuming with round {start + 1}")
            ended = has_ended(lines, config.rounds)  # it may lack only its model
            losses = LostRounds(config.rounds, lines=lines)
            done = None if ended else run_rounds(experiment, start, [*watching, losses])
            rounds = start if done is None else done.number + 1
            save_model(config.directory / files.MODEL_FILE, experiment.result, rounds, experiment.parts)
            if done is not None and not done.last:
                request.heed()
    finally:
        experiment.close()


def open_callbacks(
    experiment: Experiment | MultiModel, lines: Sequence[dict[str, Any]], request: Request
) -> list[Callback]:
    """Return the callbacks of a run, in the order in which a round is written to disk.

    The model comes before the line of metrics, so that the run can resume from each round that has a line. `lines` are
    those of the rounds that an earlier process has finished.
    """
    config, trackers = experiment.config, open_trackers(experiment.config)
    return [
        Interruption(request),
        EarlyStop(config, lines),
        SaveBest(experiment, lines),
        SaveCheckpoints(experiment),
        MetricsFile(config),
        *trackers,
    ]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads, on which rounding depends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _go_back(config: Config, experiment: Experiment | MultiModel) -> tuple[int, list[dict[str, Any]]]:
    """Load the last checkpoint that has metrics; return its round and the metrics up to it."""
    path = config.directory / files.METRICS_FILE
    lines = read_lines(path)
    found = find_checkpoint(config.directory, len(lines))
    start = 0
    if found is not None:
        where, checkpoint = found
        checkpoint.restore(experiment.model, experiment.sampler, keepers_of(experiment.parts))
        start = checkpoint.rounds
        if where.name != files.CHECKPOINT_FILE:  # else the next checkpoint would replace it
            where.replace(config.directory / files.CHECKPOINT_FILE)
    if start < len(lines):
        log.warning("%s: rounds %d to %d are run again", config.directory, start, len(lines) - 1)
    keep_lines(path, start)
    keep_lines(config.directory / files.LAYERS_FILE)
    return start, lines[:start]


def _describe(
    config: Config, experiment: Experiment | MultiModel, clients: Clients, held: Provenance | None, start: int
) -> None:
    """Write the configuration, the clients' data, and the provenance."""
    write_whole(config.directory / files.CONFIG_FILE, dump_yaml(plain(config)).encode())
    write_whole(config.directory / files.CLIENTS_FILE, json.dumps(clients).encode())
    made = held.resumed(describe_start(start)) if held else Provenance.of(config, experiment.parts, start)
    write_whole(config.directory / files.PROVENANCE_FILE, made.to_json().encode())
