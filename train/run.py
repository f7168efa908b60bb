"""One training run, from its configuration to its directory of results."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from train.checkpoint import BEST_FILE, MODEL_FILE, Checkpoint, Keeper, find_checkpoint, rounds_of, save_checkpoint
from train.config import Config
from train.directory import CONFIG_FILE, METRICS_FILE, check_directory, check_writable, hold, plain
from train.engines.post import Gloo, Mailbox, WorkerError
from train.engines.workers import serve
from train.experiment import Experiment, assemble, check_models
from train.failures import REMEDY, RunError
from train.files import write_whole
from train.interrupts import Request, stop_on_request
from train.lines import has_ended, keep_lines, read_lines
from train.parts import import_parts
from train.pilots import teach
from train.provenance import PROVENANCE_FILE, Provenance, describe_start, keep_device
from train.records import CLIENTS_FILE, LAYERS_FILE, Clients, check_clients, describe_clients
from train.rounds import Metrics, run_rounds
from train.stages import enter
from train.stopping import EarlyStop
from train.tasks import Tasks, assemble_tasks, run_tasks
from train.tracking import Tracker, Trackers, check_trackers

log = logging.getLogger(__name__)

Build = Callable[[Config], Experiment | Tasks]


def run(
    config: Config,
    progress: Callable[[Metrics], None],
    resume: bool = False,
    build: Build | None = None,
) -> Path:
    """Train as configured and return the directory with `config.yaml`, `metrics.jsonl` and `model.safetensors`.

    Args:
        config: of the run.
        progress: is handed each round's metrics.
        resume: go on with the run that the directory holds, from its last checkpoint; with more rounds where the
            schedule leaves those before as they were.
        build: makes the parts of the run; those of a simulation by default.

    Raises:
        UserError: the directory holds a run already (or another one, on resuming), or a part cannot be built.
        RunError: the run cannot go on: a full disk, a worker that died, a training that diverged.
        Stopped: a signal asked for it; there is a checkpoint of the last finished round.
    """
    import_parts(config.imports)
    check_directory(config, resume)
    check_writable(config.directory)
    check_trackers(config)
    check_models(config)
    if resume and is_finished(config):
        return config.directory
    with threads(config.threads):
        held = Provenance.read(config.directory) if resume else None
        experiment = prepare(config, held, build or (assemble_tasks if config.tasks else assemble))
        try:
            with hold(config.directory), _workers_at_work():
                check_directory(config, resume)  # again, now that nobody else writes
                clients = describe_clients(experiment.parts)
                if resume:
                    check_clients(config.directory, clients)
                start, lines = _go_back(config, experiment) if resume else (0, [])
                _describe(config, experiment, clients, held, start)
                if isinstance(experiment, Experiment):
                    teach(experiment, config.directory)
                with stop_on_request() as request, Trackers(config) as trackers:
                    for name, part in experiment.parts.items():
                        part.observers.append(trackers.observe(name))
                    record = Recorder(config, experiment, trackers, lines, progress, request)
                    enter("trains its first round" if start == 0 else f"goes on with round {start + 1}")
                    _run_rounds(experiment, start, record)
        finally:
            experiment.close()
    return config.directory


def follow(config: Config) -> None:
    """Train what the process of rank 0 asks for, and write nothing."""
    if config.tasks:
        assemble_tasks(config)  # says why not
    torch.set_num_threads(config.threads)
    serve(assemble(config).job, Gloo(0), Mailbox())


def is_finished(config: Config) -> bool:
    """Return whether the run has come to its end: metrics and a readable checkpoint of all rounds."""
    found = find_checkpoint(config.directory, config.rounds) if is_measured(config) else None
    return found is not None and found[1].rounds == _end(config)


def is_measured(config: Config) -> bool:
    """Return whether there are metrics of all rounds, and no checkpoint that says otherwise.

    Enough for a table. The model was on disk before the last line; somebody may have taken it away since.
    """
    end, model = _end(config), config.directory / MODEL_FILE
    return end is not None and (not model.exists() or rounds_of(model) == end)


def _end(config: Config) -> int | None:
    """Return the rounds with which the run has ended, early or not; None where it has not."""
    lines = read_lines(config.directory / METRICS_FILE)
    return len(lines) if has_ended(lines, config.rounds) else None


def prepare(config: Config, held: Provenance | None, build: Build) -> Experiment | Tasks:
    """Build all that a run needs, and choose the ways to compute in or keep those of its start; writes nothing."""
    experiment = build(keep_device(config, held))
    for name, part in experiment.parts.items():
        part.open(held.choices.get(name) if held else None)
    return experiment


class Recorder:
    """Takes each round's metrics, and has the round on disk before the next one starts.

    First the best model, then the checkpoint, then the line of metrics: a line stands for a round that can be gone back
    to, and where the process dies between them, the round is run again.
    """

    def __init__(
        self,
        config: Config,
        experiment: Experiment | Tasks,
        trackers: Tracker,
        lines: Sequence[dict[str, Any]],
        progress: Callable[[Metrics], None],
        request: Request,
    ) -> None:
        self._config, self._experiment, self._trackers = config, experiment, trackers
        self._progress, self._request = progress, request
        self._best = max((line["test_accuracy"] for line in lines if "test_accuracy" in line), default=-1.0)
        self._early = EarlyStop(config, lines)

    def __call__(self, t: int, metrics: Metrics) -> bool:
        """Record round t, and return whether the run ends with it.

        Raises:
            RunError: the disk is full, or takes no writing.
            Stopped: a signal asked for it.
        """
        config, done, stopping = self._config, t + 1, self._request.signal is not None
        accuracy, why = metrics.get("test_accuracy"), self._early.reason(metrics)
        ended = why is not None or done == config.rounds
        if why is not None:
            metrics["stopped"] = why
        if isinstance(accuracy, float) and accuracy > self._best:
            self._best = accuracy
            write_whole(config.directory / BEST_FILE, Checkpoint.of(self._experiment.result, done).to_bytes())
        if stopping or ended or done % config.checkpoint_every == 0:
            save_checkpoint(config.directory, self._checkpoint(done))
        self._trackers.log(metrics)
        self._progress(metrics)
        if stopping and not ended:
            self._request.heed()
        return ended

    def _checkpoint(self, rounds: int) -> Checkpoint:
        parts = self._experiment
        return Checkpoint.of(parts.model, rounds, parts.sampler, _keepers(parts))


def _keepers(experiment: Experiment | Tasks) -> dict[str, Keeper]:
    servers: dict[str, Keeper] = {f"server/{name}": part.server for name, part in experiment.parts.items()}
    averages = {f"average/{name}": part.average for name, part in experiment.parts.items()}
    return servers | {place: average for place, average in averages.items() if average is not None}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch compute in so many threads, which shows in how it rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _go_back(config: Config, experiment: Experiment | Tasks) -> tuple[int, list[dict[str, Any]]]:
    """Load the last checkpoint of which there are metrics; return its round and the metrics up to there."""
    path = config.directory / METRICS_FILE
    lines = read_lines(path)
    found = find_checkpoint(config.directory, len(lines), experiment.model)
    start = 0
    if found is not None:
        where, checkpoint = found
        checkpoint.restore(experiment.model, experiment.sampler, _keepers(experiment))
        start = checkpoint.rounds
        if where.name != MODEL_FILE:  # else the next checkpoint would push it out
            where.replace(config.directory / MODEL_FILE)
    if start < len(lines):
        log.warning("%s: rounds %d to %d are run again", config.directory, start, len(lines) - 1)
    keep_lines(path, start)
    keep_lines(config.directory / LAYERS_FILE)
    return start, lines[:start]


def _describe(
    config: Config, experiment: Experiment | Tasks, clients: Clients, held: Provenance | None, start: int
) -> None:
    """Write the configuration, who has what, and what the run is made with."""
    write_whole(config.directory / CONFIG_FILE, yaml.safe_dump(plain(config), sort_keys=False).encode())
    write_whole(config.directory / CLIENTS_FILE, json.dumps(clients).encode())
    made = held.resumed(describe_start(start)) if held else Provenance.of(config, experiment.parts, start)
    write_whole(config.directory / PROVENANCE_FILE, made.to_json().encode())


@contextmanager
def _workers_at_work() -> Iterator[None]:
    """Tell of a worker that failed or was killed in one line; what it said itself is shown by --debug.

    Raises:
        RunError: one did.
    """
    try:
        yield
    except WorkerError as error:
        why = str(error).rstrip().splitlines()
        raise RunError(f"{why[0].rstrip(':')}{f': {why[-1]}' if len(why) > 1 else ''}; {REMEDY}") from error


def _run_rounds(experiment: Experiment | Tasks, start: int, record: Callable[[int, Metrics], bool]) -> None:
    if isinstance(experiment, Tasks):
        run_tasks(experiment, start, record)
    else:
        run_rounds(experiment, start, record)
