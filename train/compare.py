"""Several runs that differ in strategy and seed alone, side by side in processes of one thread each.

One thread, because small models gain nothing from more, and because sums in a different number of threads round
differently: like this, the results are the same whatever the number of jobs.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Empty
from typing import TypeAlias

import torch

from sharding.errors import UserError
from train.config import Config, load_config
from train.engines.workers import num_cores
from train.rounds import Metrics
from train.run import check_directory, run

log = logging.getLogger(__name__)

ProgressQueue: TypeAlias = "Queue[tuple[int, Metrics]]"
Counter: TypeAlias = "Synchronized[int]"
Progress = Callable[[int, Metrics], None]  # takes the cell's place in the list, and a round's metrics


def plan_cells(
    path: str, overrides: Sequence[str], strategies: Sequence[str], seeds: Sequence[int] | None
) -> list[Config]:
    """Return the configurations to run, each with a directory of its own under the comparison's.

    Raises:
        UserError: a mistake in the file, an override, or any of the strategies; no strategy at all.
    """
    if not strategies:
        raise UserError("--strategies names no strategy; write for example --strategies unbiased,collective")
    base = load_config(path, overrides)
    into = base.output or Path("runs") / f"{base.name}-compare"
    return [
        load_config(
            path,
            [*overrides, f"strategy={strategy}", f"seed={seed}", f"output={into / f'{strategy}-{seed}'}"],
        )
        for strategy in dict.fromkeys(strategies)
        for seed in dict.fromkeys(seeds or [base.seed])
    ]


def default_jobs() -> int:
    """Return how many runs go side by side: one a GPU, or one a core where there is none."""
    return torch.cuda.device_count() or num_cores()


def compare(cells: Sequence[Config], progress: Progress, jobs: int, resume: bool = False) -> dict[Path, str]:
    """Run every cell, `jobs` at a time; nothing starts unless all can.

    On a machine with GPUs the workers are dealt out to them.

    Returns:
        Why a cell failed, by its directory; the others have finished. A failure does not stop the others.
    """
    for cell in cells:
        check_directory(cell, resume)
    context = get_context("spawn")
    queue: ProgressQueue = context.Queue()
    places = context.Value("i", 0)
    with ProcessPoolExecutor(min(jobs, len(cells)) or 1, context, _start_worker, (queue, places)) as pool:
        futures = [pool.submit(_run_cell, cell, place, resume) for place, cell in enumerate(cells)]
        try:
            _relay(queue, futures, progress)
        finally:
            pool.shutdown(cancel_futures=True)  # when interrupted, the cells under way still finish, and are kept
    return {cell.directory: why for cell, future in zip(cells, futures, strict=True) if (why := future.result())}


def _start_worker(queue: ProgressQueue, places: Counter) -> None:
    torch.set_num_threads(1)
    _workers_queue.append(queue)
    if torch.cuda.is_available():
        with places.get_lock():
            place, places.value = places.value, places.value + 1
        torch.cuda.set_device(place % torch.cuda.device_count())


_workers_queue: list[ProgressQueue] = []  # of this worker process; a queue can be handed over at its start only


def _run_cell(cell: Config, place: int, resume: bool) -> str:
    """Run a cell in a worker; return why it failed, or nothing."""

    def report(metrics: Metrics) -> None:
        if (parent := parent_process()) is not None and not parent.is_alive():
            os._exit(1)  # killed; after a mere exception the worker would wait for its next cell for ever
        _workers_queue[0].put((place, metrics))

    try:
        run(cell, report, resume)
    except Exception as error:
        log.debug("%s failed", cell.directory, exc_info=True)
        return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return ""


def _relay(queue: ProgressQueue, futures: Sequence[Future[str]], progress: Progress) -> None:
    """Hand the workers' metrics on until all have finished; a worker that died is raised here."""
    while True:
        done = [future for future in futures if future.done()]
        for future in done:
            future.result()
        try:
            progress(*queue.get(timeout=0.1))
        except Empty:
            if len(done) == len(futures):
                return
