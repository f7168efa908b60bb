"""Run several configurations in parallel: the points of a grid, or the cells of a table.

Each process has one thread: small models gain nothing from more, and another number of threads would round sums
differently. So results do not depend on the number of jobs.
"""

import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from sharding.errors import UserError
from train.callbacks import EachRound
from train.callbacks.trackers import check_trackers
from train.config.naming import describe
from train.config.overrides import check_once, expand, settings
from train.config.schema import Config, load_config
from train.config.unread import refuse_unread
from train.engines.processes import context_of, num_cores
from train.run import run
from train.rundir.directory import check_directory
from train.utils.errors import REMEDY, RunError
from train.utils.signals import ENDING, Stopped, stop_on_request
from train.utils.stages import stage_listener

log = logging.getLogger(__name__)

OnRound = Callable[[int, dict[str, Any]], None]  # takes the run's index in the list, and a round's metrics
OnStage = Callable[[int, str], None]  # takes the run's index, and what it does before its first round
POLL_SECONDS = 0.2  # after which a request to stop is seen at the latest


@dataclass(frozen=True)
class FailedRun:
    """The reason why a run failed, and whether that was a user's mistake."""

    reason: str
    is_mistake: bool = False


def grid_configs(
    path: str,
    overrides: Sequence[str],
    strategies: Sequence[str],
    seeds: Sequence[int] | None,
    grids: Sequence[str] = (),
) -> list[Config]:
    """Return the configuration of every point of a grid, each with its own directory inside the comparison's.

    Raises:
        UserError: a mistake in the file, an override, a grid, or any of the strategies; nothing to compare; a key that
            is set twice.
    """
    if not (strategies or seeds or grids):
        raise UserError(
            "there is nothing to compare; write --strategies top_n,dense, --seeds 0,1 or --grid rounds=10,20"
        )
    named = [("strategy", "--strategies")] * bool(strategies) + [("seed", "--seeds")] * bool(seeds)
    check_once([*settings(overrides), *settings(grids), *named])
    configs: dict[str, Config] = {}
    for strategy, point, seed in product(_axis("strategy", strategies), expand(grids), _axis("seed", seeds or ())):
        config = load_config(path, [*overrides, *strategy, *point, *seed])
        name = "-".join(filter(None, (config.strategy, describe(config, point), str(config.seed))))
        if name in configs:
            raise UserError(f"--grid has several points for the run {name}: {', '.join(point)} makes no other run")
        configs[name] = config
    refuse_unread([*configs.values()], [*overrides, *grids])
    base = next(iter(configs.values()))
    shared = describe(base, overrides)
    into = base.output or Path("runs") / "-".join(filter(None, (base.name, "compare", shared)))
    return [each.model_copy(update={"output": into / name}) for name, each in configs.items()]


def _axis(key: str, values: Sequence[object]) -> list[tuple[str, ...]]:
    """Return the overrides that set a key to each of these values; one empty override without values."""
    return [(f"{key}={value}",) for value in dict.fromkeys(values)] or [()]


def default_jobs() -> int:
    """Return how many runs to train in parallel: one per GPU, or one per core without a GPU."""
    return torch.cuda.device_count() or num_cores()


def sweep(
    configs: Sequence[Config],
    on_round: OnRound,
    jobs: int,
    resume: bool = False,
    on_stage: OnStage = lambda index, stage: None,
) -> dict[Path, FailedRun]:
    """Run every configuration, `jobs` at a time.

    Nothing starts unless all runs can. Runs are spread over the GPUs, if there are any.

    Returns:
        The failures, by directory; all other runs have finished. A failure does not stop the other runs.

    Raises:
        Stopped: a signal asked to stop. No more runs were started, and running ones finished their round.
    """
    for config in configs:
        check_directory(config, resume)
        check_trackers(config)
    waiting, workers = deque(range(len(configs))), dict[Connection, Worker]()
    slots, failures = list(range(min(jobs, len(configs)))), dict[Path, FailedRun]()
    context = context_of(__name__)
    with stop_on_request() as request, _killing_at_end(workers):
        while waiting or workers:
            if request.signal is not None:
                waiting.clear()
                for worker in workers.values():
                    worker.process.terminate()  # it finishes its round, however often it is asked
            while waiting and slots:
                index, slot = waiting.popleft(), slots.pop(0)
                receiver, process = _start(context, configs[index], resume, slot)
                workers[receiver] = Worker(index, slot, process)
            for pipe in wait([*workers], POLL_SECONDS):
                assert isinstance(pipe, Connection)
                worker = workers[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    slots.append(workers.pop(pipe).slot)
                    message = None if request.signal is not None else _killed(worker.process.exitcode)
                if isinstance(message, dict):
                    on_round(worker.index, message)
                elif isinstance(message, str):
                    on_stage(worker.index, message)
                elif message is not None:
                    failures[configs[worker.index].directory] = message
        request.raise_if_set()
    return failures


@dataclass(frozen=True)
class Worker:
    """A process that runs one configuration. It shares nothing with the others: if it is killed, they continue.

    Attributes:
        index: the index of its configuration.
        slot: the number of its place among the parallel jobs.
    """

    index: int
    slot: int
    process: BaseProcess


def _start(context: Any, config: Config, resume: bool, slot: int) -> tuple[Connection, BaseProcess]:
    """Start a process that runs a configuration; return the end of the pipe from it, and the process."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(config, resume, slot, sender))
    process.start()
    sender.close()
    return receiver, process


def _killed(exit_code: int | None) -> FailedRun | None:
    """Return the failure of a run whose process was stopped or killed; None if it ended by itself."""
    reason = f"its process was stopped or killed (exit code {exit_code}), perhaps because memory ran out"
    return FailedRun(f"{reason}; {REMEDY}") if exit_code else None


@contextmanager
def _killing_at_end(workers: Mapping[Connection, Worker]) -> Iterator[None]:
    """Kill the processes that still run at the end."""
    try:
        yield
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.join()


def _work(config: Config, resume: bool, slot: int, pipe: Connection) -> None:
    """Run a configuration; send its stages, the metrics of its rounds, and a `FailedRun` if it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; what it means is passed on by SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    if torch.cuda.is_available():
        torch.cuda.set_device(slot % torch.cuda.device_count())

    def send(message: dict[str, object] | str) -> None:
        try:
            pipe.send(message)
        except OSError:  # whoever started this is gone
            raise Stopped(signal.SIGTERM) from None

    try:
        with stage_listener(send):
            run(config, [EachRound(send)], resume)
    except KeyboardInterrupt:  # unless the parent asked for it, this is a failure
        os._exit(1)
    except Exception as error:
        log.debug("%s failed", config.directory, exc_info=True)
        is_mistake = isinstance(error, UserError | ImportError)  # a package that an option needs is missing
        reason = str(error) if is_mistake or isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        pipe.send(FailedRun(reason, is_mistake))
