"""Run several configurations that differ in strategy, seed and the keys of a grid, in parallel.

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
from typing import Any, NamedTuple

import torch

from sharding.errors import UserError
from train.callbacks import EachRound
from train.callbacks.stopping import DivergedError
from train.callbacks.trackers import check_trackers
from train.config.idle_keys import refuse_idle
from train.config.naming import check_once, describe, expand, settings
from train.config.schema import Config, LoadedConfig, read_config
from train.engines.processes import context_of, num_cores
from train.experiment import Metrics
from train.run import run
from train.rundir.directory import check_directory
from train.runtime.errors import REMEDY, RunError
from train.runtime.signals import Stopped, stop_on_request
from train.runtime.stages import watched

log = logging.getLogger(__name__)

Progress = Callable[[int, Metrics], None]  # takes the cell's place in the list, and a round's metrics
Stage = Callable[[int, str], None]  # takes the cell's place, and what it does before its first round
POLL = 0.2  # seconds after which a request to stop is seen at the latest


@dataclass(frozen=True)
class FailedRun:
    """Why a run failed, and whether the cause was a user's mistake or a training that diverged."""

    why: str
    mistake: bool = False
    diverged: bool = False


def plan_cells(
    path: str,
    overrides: Sequence[str],
    strategies: Sequence[str],
    seeds: Sequence[int] | None,
    grids: Sequence[str] = (),
) -> list[Config]:
    """Return the configurations to run, each with its own directory inside the comparison's.

    Raises:
        UserError: a mistake in the file, an override, a grid, or any of the strategies; nothing to compare; a key that
            is set twice.
    """
    if not strategies and not grids:
        raise UserError("--strategies names no strategy and there is no --grid; write --strategies unbiased,collective")
    named = [("strategy", "--strategies")] * bool(strategies) + [("seed", "--seeds")] * bool(seeds)
    check_once([*settings(overrides), *settings(grids), *named])
    cells: dict[str, LoadedConfig] = {}
    for strategy, point, seed in product(_axis("strategy", strategies), expand(grids), _axis("seed", seeds or ())):
        cell = read_config(path, [*overrides, *strategy, *point, *seed])
        name = "-".join(filter(None, (cell.config.strategy, describe(point), str(cell.config.seed))))
        if name in cells:
            raise UserError(f"--grid has several points for the run {name}: {', '.join(point)} makes no other run")
        cells[name] = cell
    refuse_idle([*cells.values()])
    base = next(iter(cells.values())).config
    into = base.output or Path("runs") / "-".join(filter(None, (base.name, "compare", describe(overrides))))
    return [cell.config.model_copy(update={"output": into / name}) for name, cell in cells.items()]


def _axis(key: str, values: Sequence[object]) -> list[tuple[str, ...]]:
    """Return the overrides that set a key to each of these values; one empty override without values."""
    return [(f"{key}={value}",) for value in dict.fromkeys(values)] or [()]


def default_jobs() -> int:
    """Return how many runs to train in parallel: one per GPU, or one per core without a GPU."""
    return torch.cuda.device_count() or num_cores()


def compare(
    cells: Sequence[Config],
    progress: Progress,
    jobs: int,
    resume: bool = False,
    stage: Stage = lambda place, stage: None,
) -> dict[Path, FailedRun]:
    """Run every cell, `jobs` at a time.

    Nothing starts unless all cells can. Runs are spread over the GPUs, if there are any.

    Returns:
        The failures, by directory; all other cells have finished. A failure does not stop the other cells.

    Raises:
        Stopped: a signal asked to stop. No more cells were started, and running ones finished their round.
    """
    for cell in cells:
        check_directory(cell, resume)
        check_trackers(cell)
    waiting, working, slots = deque(range(len(cells))), dict[Connection, Worker](), list(range(min(jobs, len(cells))))
    context, failures = context_of(__name__), dict[Path, FailedRun]()
    with stop_on_request() as request, _ending(working):
        while waiting or working:
            if request.signal is not None:
                waiting.clear()
                for worker in working.values():
                    worker.process.terminate()  # it finishes its round, however often it is asked
            while waiting and slots:
                place, slot = waiting.popleft(), slots.pop(0)
                pipe, process = _start(context, cells[place], resume, slot)
                working[pipe] = Worker(place, slot, process)
            for line in wait([*working], POLL):
                assert isinstance(line, Connection)
                worker = working[line]
                try:
                    message = line.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    slots.append(working.pop(line).slot)
                    message = None if request.signal is not None else _killed(worker.process.exitcode)
                if isinstance(message, dict):
                    progress(worker.place, message)
                elif isinstance(message, str):
                    stage(worker.place, message)
                elif message is not None:
                    failures[cells[worker.place].directory] = message
        request.heed()
    return failures


class Worker(NamedTuple):
    """A process that runs a cell. It shares nothing with the others: if it is killed, they continue.

    Attributes:
        place: index of its cell.
        slot: which of the parallel jobs it is.
    """

    place: int
    slot: int
    process: BaseProcess


def _start(context: Any, cell: Config, resume: bool, slot: int) -> tuple[Connection, BaseProcess]:
    """Start a process that runs a cell; return the end of the pipe from it, and the process."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(cell, resume, slot, theirs))
    process.start()
    theirs.close()
    return ours, process


def _killed(exit_code: int | None) -> FailedRun | None:
    """Return why a run failed whose process was stopped or killed; None if it ended by itself."""
    why = f"its process was stopped or killed (exit code {exit_code}), perhaps because memory ran out"
    return FailedRun(f"{why}; {REMEDY}") if exit_code else None


@contextmanager
def _ending(working: Mapping[Connection, Worker]) -> Iterator[None]:
    """Kill the processes that still run at the end."""
    try:
        yield
    finally:
        for worker in working.values():
            worker.process.kill()
            worker.process.join()


def _work(cell: Config, resume: bool, slot: int, line: Connection) -> None:
    """Run a cell; send its stages, the metrics of its rounds, and a `FailedRun` if it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; what it means is passed on by SIGTERM
    if torch.cuda.is_available():
        torch.cuda.set_device(slot % torch.cuda.device_count())

    def send(what: dict[str, object] | str) -> None:
        try:
            line.send(what)
        except OSError:  # whoever started this is gone
            raise Stopped(signal.SIGTERM) from None

    try:
        with watched(send):
            run(cell, [EachRound(lambda metrics: send(dict(metrics)))], resume)
    except KeyboardInterrupt:  # unless the parent asked for it, this is a failure
        os._exit(1)
    except Exception as error:
        log.debug("%s failed", cell.directory, exc_info=True)
        why = str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"
        line.send(FailedRun(why, isinstance(error, UserError), isinstance(error, DivergedError)))
