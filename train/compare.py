"""Run several configurations that differ in strategy, seed and the keys of a grid, in parallel.

Each process has one thread: small models gain nothing from more, and another number of threads would round sums
differently. So results do not depend on the number of jobs.
"""

import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from sharding.errors import UserError
from train.callbacks import EachRound
from train.callbacks.stopping import DivergedError
from train.callbacks.trackers import check_trackers
from train.config.idle_keys import refuse_idle
from train.config.naming import check_once, describe, expand, settings
from train.config.schema import Config, LoadedConfig, read_config
from train.engines.processes import num_cores
from train.metrics import Metrics
from train.run import run
from train.rundir.directory import RunDirectory
from train.runtime.errors import REMEDY, RunError
from train.runtime.signals import Stopped, stop_on_request
from train.runtime.stages import watched

log = logging.getLogger(__name__)

Progress = Callable[[int, Metrics], None]  # takes the cell's place in the list, and a round's metrics
Stage = Callable[[int, str], None]  # takes the cell's place, and what it does before its first round
POLL = 0.2  # seconds after which a request to stop is seen at the latest


@dataclass(frozen=True)
class Failure:
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
        if (name := _cell_name(cell.config, point)) in cells:
            raise UserError(f"--grid has several points for the run {name}: {', '.join(point)} makes no other run")
        cells[name] = cell
    refuse_idle([*cells.values()])
    base = next(iter(cells.values())).config
    label = describe(dict(override.split("=", 1) for override in overrides))
    into = base.output or Path("runs") / "-".join(filter(None, (base.name, "compare", label)))
    return [cell.config.model_copy(update={"output": into / name}) for name, cell in cells.items()]


def _axis(key: str, values: Sequence[object]) -> list[tuple[str, ...]]:
    """Return the overrides that set a key to each of these values; one empty override without values."""
    return [(f"{key}={value}",) for value in dict.fromkeys(values)] or [()]


def _cell_name(cell: Config, point: Sequence[str]) -> str:
    label = describe(dict(override.split("=", 1) for override in point))
    return "-".join(filter(None, (cell.strategy, label, str(cell.seed))))


def default_jobs() -> int:
    """Return how many runs to train in parallel: one per GPU, or one per core without a GPU."""
    return torch.cuda.device_count() or num_cores()


def compare(
    cells: Sequence[Config],
    progress: Progress,
    jobs: int,
    resume: bool = False,
    stage: Stage = lambda place, stage: None,
) -> dict[Path, Failure]:
    """Run every cell, `jobs` at a time.

    Nothing starts unless all cells can. Runs are spread over the GPUs, if there are any.

    Returns:
        The failures, by directory; all other cells have finished. A failure does not stop the other cells.

    Raises:
        Stopped: a signal asked to stop. No more cells were started, and running ones finished their round.
    """
    for cell in cells:
        RunDirectory(cell, resume).check()
        check_trackers(cell)
    with stop_on_request() as request, _crew(cells, jobs, resume) as crew:
        while crew.step(progress, stage, request.signal is not None):
            pass
        request.heed()
    return crew.failures


@dataclass
class Crew:
    """The processes that run cells, one each. They share nothing: if one is killed, the others continue.

    Attributes:
        waiting: indices of the cells that have not been started.
        working: the running processes, by our end of their pipe.
        failures: so far.
    """

    cells: Sequence[Config]
    jobs: int
    resume: bool
    context: BaseContext
    waiting: deque[int]
    working: dict[Connection, "Worker"] = field(default_factory=dict)
    failures: dict[Path, Failure] = field(default_factory=dict)

    def step(self, progress: Progress, stage: Stage, stopping: bool) -> bool:
        """Start cells, and process messages from the workers. Return whether any work is left."""
        if stopping:
            self.waiting.clear()
            for worker in self.working.values():
                worker.stop()
        while self.waiting and len(self.working) < self.jobs:
            self._start(self.waiting.popleft())
        for line in wait(list(self.working), POLL):
            assert isinstance(line, Connection)
            self._take(line, progress, stage, stopping)
        return bool(self.waiting or self.working)

    def end(self) -> None:
        """Kill the processes that still run."""
        for worker in self.working.values():
            worker.process.kill()
            worker.process.join()

    def _start(self, place: int) -> None:
        slots = {worker.slot for worker in self.working.values()}
        slot = next(slot for slot in range(self.jobs) if slot not in slots)
        ours, theirs = self.context.Pipe(duplex=False)
        process: BaseProcess = self.context.Process(  # type: ignore[attr-defined]
            target=_work, args=(self.cells[place], self.resume, slot, theirs)
        )
        process.start()
        theirs.close()
        self.working[ours] = Worker(place, slot, process)

    def _take(self, line: Connection, progress: Progress, stage: Stage, stopping: bool) -> None:
        """Process a message: a stage, a round's metrics, how the run ended, or that its process is gone."""
        worker = self.working[line]
        try:
            message = line.recv()
        except (EOFError, OSError):
            worker.process.join()
            del self.working[line]
            if not worker.reported and not stopping:
                why = f"its process was killed (exit code {worker.process.exitcode}), perhaps because memory ran out"
                self._fail(worker, Failure(f"{why}; {REMEDY}"))
            return
        if isinstance(message, dict):
            progress(worker.place, message)
        elif isinstance(message, str):
            stage(worker.place, message)
        else:
            worker.reported = True
            if message is not None:
                self._fail(worker, message)

    def _fail(self, worker: "Worker", failure: Failure) -> None:
        self.failures[self.cells[worker.place].directory] = failure


@dataclass
class Worker:
    """A process that runs a cell.

    Attributes:
        place: index of its cell.
        slot: which of the parallel jobs it is.
        reported: whether it has reported how the run ended.
        stopped: whether it has been asked to stop.
    """

    place: int
    slot: int
    process: BaseProcess
    reported: bool = False
    stopped: bool = False

    def stop(self) -> None:
        """Ask it, once, to stop after the current round."""
        if not self.stopped:
            self.stopped = True
            self.process.terminate()


@contextmanager
def _crew(cells: Sequence[Config], jobs: int, resume: bool) -> Iterator[Crew]:
    # Workers are forked from a process with one thread that has imported everything, which saves their imports.
    context: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["train.compare"])
    crew = Crew(cells, jobs, resume, context, deque(range(len(cells))))
    try:
        yield crew
    finally:
        crew.end()


def _work(cell: Config, resume: bool, slot: int, line: Connection) -> None:
    """Run a cell, and send how it ended: None, or a `Failure`."""
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
        line.send(None)
    except KeyboardInterrupt:
        os._exit(0)
    except Exception as error:
        log.debug("%s failed", cell.directory, exc_info=True)
        why = str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"
        line.send(Failure(why, isinstance(error, UserError), isinstance(error, DivergedError)))
