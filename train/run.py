"""Run one training, from its configuration to its directory of results."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from train.callbacks import Callback, closing
from train.callbacks.saving import MetricsFile, SaveBest, SaveCheckpoints, states_of
from train.callbacks.stopping import Interruption, LostRounds
from train.callbacks.trackers import check_trackers, open_trackers
from train.config.schema import Config
from train.config.yaml_text import dump_yaml
from train.experiment.assembly import assemble
from train.experiment.experiment import Experiment
from train.experiment.history import History
from train.experiment.metrics import RoundMetrics
from train.rounds import run_rounds
from train.rundir import file_names as files
from train.rundir.checkpoint import Stateful, find_checkpoint
from train.rundir.directory import is_finished, open_directory, plain
from train.rundir.model_file import save_model
from train.rundir.provenance import Provenance, describe_start, keep_device
from train.rundir.records import ClientRecords, check_clients, describe_clients, write_clients
from train.rundir.secret import open_account, write_secret
from train.utils.files import write_atomically
from train.utils.jsonl import keep_lines, read_lines
from train.utils.signals import StopRequest, stop_on_request
from train.utils.stages import set_stage
from train.variants.multi_model import MultiModel, assemble_models, run_multi_model
from train.variants.pilots import RunPilots

log = logging.getLogger(__name__)

Build = Callable[[Config], Experiment | MultiModel]


def run(config: Config, callbacks: Sequence[Callback] = (), resume: bool = False, build: Build | None = None) -> Path:
    """Train as configured and return the directory with `config.yaml`, `metrics.jsonl` and `model.safetensors`.

    Args:
        config: the configuration of the run.
        callbacks: act after each round, and are closed at the end.
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
    provenance = Provenance.read(config.directory) if resume else None
    experiment = build(keep_device(config, provenance))
    try:
        models = [*experiment.parts.values()] if isinstance(experiment, MultiModel) else [experiment]
        clients = describe_clients(models)
        if resume:
            check_clients(config, clients)
        account = open_account(config, models[0], resume)
        states = states_of(models)
        earlier = _restore(config, experiment.model, states) if resume else []
        for one in models:
            if earlier:  # what is frozen may have been rounded on another processor
                one.job = replace(one.job, frozen=one.server.frozen)
            one.start()  # now, so that errors appear before a new run writes anything
            key = f"{one.config.name}/new_clients"
            lines = (metrics.extra.get(key, metrics.new_clients) for metrics in earlier)
            one.with_residual.update(client for new in lines for client in new or ())
        write_secret(config, models[0], account)  # before anything that says that the run has begun
        _describe(config, models, clients, provenance, len(earlier))
        history, lost = History(config, earlier, account), LostRounds(config.rounds, earlier=earlier)
        lost.raise_if_diverged()
        checkpoints = SaveCheckpoints(config, experiment.model, states)
        best = SaveBest(config.directory / files.BEST_FILE, experiment.result, models, history)
        with (
            stop_on_request() as request,
            closing([checkpoints, best, *open_callbacks(config, request), lost, *callbacks]) as watching,
        ):
            for callback in watching:
                for one in models:
                    callback.before_training(one)
            set_stage("training its first round" if not earlier else f"resuming with round {len(earlier) + 1}")
            ended = len(earlier) == config.rounds or history.stopped is not None
            last = None if ended else _rounds(experiment, len(earlier), watching, history)
            lost.raise_if_diverged()
            rounds = len(earlier) if last is None else last.round + 1
            checkpoints.save()
            save_model(config.directory / files.MODEL_FILE, experiment.result, rounds, models)
            if last is not None and rounds < config.rounds and last.stopped is None:
                request.raise_if_set()
    finally:
        experiment.close()


def _rounds(
    experiment: Experiment | MultiModel, start: int, callbacks: Sequence[Callback], history: History
) -> RoundMetrics | None:
    """Run the rounds of one model or of several."""
    if isinstance(experiment, MultiModel):
        return run_multi_model(experiment, start, callbacks, history)
    return run_rounds(experiment, start, callbacks, history)


def open_callbacks(config: Config, request: StopRequest) -> list[Callback]:
    """Return the callbacks that a configuration asks for, and those that every run has."""
    pilots = [RunPilots(request)] if config.clients.pilot_losses else []
    return [*pilots, Interruption(request), MetricsFile(config), *open_trackers(config)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads, on which rounding depends."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _restore(config: Config, model: nn.Module, states: Mapping[str, Stateful]) -> list[RoundMetrics]:
    """Load the last checkpoint that has metrics; return the metrics of its rounds."""
    path = config.directory / files.METRICS_FILE
    lines = read_lines(path)
    start, newest = 0, find_checkpoint(config.directory, len(lines))
    if newest is not None:
        file, checkpoint = newest
        checkpoint.restore(model, states)
        start = checkpoint.rounds
        if file.name != files.CHECKPOINT_FILE:  # else the next checkpoint would replace it
            file.replace(config.directory / files.CHECKPOINT_FILE)
    if start < len(lines):
        log.warning("%s: rounds %d to %d are run again", config.directory, start, len(lines) - 1)
    keep_lines(path, start)
    keep_lines(config.directory / files.LAYERS_FILE)
    return [RoundMetrics.from_dict(line) for line in lines[:start]]


def _describe(
    config: Config, models: Sequence[Experiment], clients: ClientRecords, provenance: Provenance | None, start: int
) -> None:
    """Write the configuration, the clients' data and the provenance."""
    write_atomically(config.directory / files.CONFIG_FILE, dump_yaml(plain(config)).encode())
    write_clients(config, clients)
    updated = provenance.resumed(describe_start(start)) if provenance else Provenance.of(config, models, start)
    write_atomically(config.directory / files.PROVENANCE_FILE, updated.to_json().encode())
