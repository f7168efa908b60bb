"""Several runs that differ in strategy, seed and the keys of a grid, side by side in processes of one thread each.

One thread, because small models gain nothing from more, and because sums in a different number of threads round
differently: like this, the results are the same whatever the number of jobs.
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
from train.config.schema import Asked, Config, read_config
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
    """Why a run failed, whether what was asked for was wrong, and whether it was the training that diverged."""

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
    """Return the configurations to run, each with a directory of its own under the comparison's.

    Raises:
        UserError: a mistake in the file, an override, a grid, or any of the strategies; nothing to compare; a key that
            is set twice.
    """
    if not strategies and not grids:
        raise UserError("--strategies names no strategy and there is no --grid; write --strategies unbiased,collective")
    named = [("strategy", "--strategies")] * bool(strategies) + [("seed", "--seeds")] * bool(seeds)
    check_once([*settings(overrides), *settings(grids), *named])
    cells: dict[str, Asked] = {}
    for strategy, point, seed in product(_axis("strategy", strategies), expand(grids), _axis("seed", seeds or ())):
        cell = read_config(path, [*overrides, *strategy, *point, *seed])
        if (name := _cell_name(cell.config, point)) in cells:
            raise UserError(f"--grid has several points for the run {name}: {', '.join(point)} makes no other run")
        cells[name] = cell
    refuse_idle([*cells.values()])
    base = next(iter(cells.values())).config
    told = describe(dict(override.split("=", 1) for override in overrides))
    into = base.output or Path("runs") / "-".join(filter(None, (base.name, "compare", told)))
    return [cell.config.model_copy(update={"output": into / name}) for name, cell in cells.items()]


def _axis(key: str, values: Sequence[object]) -> list[tuple[str, ...]]:
    """Return the overrides that set a key to each of these values; without any it stays as it is."""
    return [(f"{key}={value}",) for value in dict.fromkeys(values)] or [()]


def _cell_name(cell: Config, point: Sequence[str]) -> str:
    told = describe(dict(override.split("=", 1) for override in point))
    return "-".join(filter(None, (cell.strategy, told, str(cell.seed))))


def default_jobs() -> int:
    """Return how many runs go side by side: one a GPU, or one a core where there is none."""
    return torch.cuda.device_count() or num_cores()


def compare(
    cells: Sequence[Config],
    progress: Progress,
    jobs: int,
    resume: bool = False,
    stage: Stage = lambda place, stage: None,
) -> dict[Path, Failure]:
    """Run every cell, `jobs` at a time; nothing starts unless all can.

    On a machine with GPUs the runs are dealt out to them.

    Returns:
        Why a cell failed, by its directory; the others have finished. A failure does not stop the others.

    Raises:
        Stopped: a signal asked for it. No more cells were started, those under way finished their round.
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
    """The processes that run cells, one each.

    A cell's own process shares nothing with the others: when it is killed, it takes none with it.

    Attributes:
        waiting: places of the cells that have not been started.
        working: what runs, by the end of the pipe from it.
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
        """Start what can be started, take in what is told; return whether there is more to come."""
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
        """End what still runs, at once."""
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
        """Take in a round's metrics, what comes before the first, how the run ended, or that its process is gone."""
        worker = self.working[line]
        try:
            told = line.recv()
        except (EOFError, OSError):
            worker.process.join()
            del self.working[line]
            if not worker.told and not stopping:
                why = f"its process was killed (exit code {worker.process.exitcode}), perhaps for want of memory"
                self._fail(worker, Failure(f"{why}; {REMEDY}"))
            return
        if isinstance(told, dict):
            progress(worker.place, told)
        elif isinstance(told, str):
            stage(worker.place, told)
        else:
            worker.told = True
            if told is not None:
                self._fail(worker, told)

    def _fail(self, worker: "Worker", failure: Failure) -> None:
        self.failures[self.cells[worker.place].directory] = failure


@dataclass
class Worker:
    """One process.

    Attributes:
        place: of its cell.
        slot: of the jobs at a time.
        told: whether it said how the run ended.
        stopped: whether it has been told to stop.
    """

    place: int
    slot: int
    process: BaseProcess
    told: bool = False
    stopped: bool = False

    def stop(self) -> None:
        """Have it stop after the round under way; once."""
        if not self.stopped:
            self.stopped = True
            self.process.terminate()


@contextmanager
def _crew(cells: Sequence[Config], jobs: int, resume: bool) -> Iterator[Crew]:
    # A process of one thread that has imported all there is to import, and forks: faster than to start each anew.
    context: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["train.compare"])
    crew = Crew(cells, jobs, resume, context, deque(range(len(cells))))
    try:
        yield crew
    finally:
        crew.end()


def _work(cell: Config, resume: bool, slot: int, line: Connection) -> None:
    """Run a cell, and tell how it ends: nothing if well, else a `Failure`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; what it means is passed on by SIGTERM
    if torch.cuda.is_available():
        torch.cuda.set_device(slot % torch.cuda.device_count())

    def tell(what: dict[str, object] | str) -> None:
        try:
            line.send(what)
        except OSError:  # whoever started this is gone
            raise Stopped(signal.SIGTERM) from None

    try:
        with watched(tell):
            run(cell, [EachRound(lambda metrics: tell(dict(metrics)))], resume)
        line.send(None)
    except KeyboardInterrupt:
        os._exit(0)
    except Exception as error:
        log.debug("%s failed", cell.directory, exc_info=True)
        why = str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"
        line.send(Failure(why, isinstance(error, UserError), isinstance(error, DivergedError)))
