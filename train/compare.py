"""Several runs that differ in strategy and seed alone, side by side in processes of one thread each.

One thread, because small models gain nothing from more, and because sums in a different number of threads round
differently: like this, the results are the same whatever the number of jobs.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import TypeAlias

import torch

from sharding.errors import UserError
from train.config import Config, load_config
from train.rounds import Metrics
from train.run import check_directory, run

ProgressQueue: TypeAlias = "Queue[tuple[int, Metrics]]"
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


def compare(cells: Sequence[Config], progress: Progress, jobs: int, resume: bool = False) -> list[Path]:
    """Run every cell, `jobs` at a time, and return their directories; nothing starts unless all can."""
    for cell in cells:
        check_directory(cell, resume)
    context = get_context("spawn")
    queue: ProgressQueue = context.Queue()
    with ProcessPoolExecutor(min(jobs, len(cells)), context, _start_worker, (queue,)) as pool:
        futures = [pool.submit(_run_cell, cell, place, resume) for place, cell in enumerate(cells)]
        try:
            _relay(queue, futures, progress)
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure the cells under way still finish, and are kept
        return [future.result() for future in futures]


def _start_worker(queue: ProgressQueue) -> None:
    torch.set_num_threads(1)
    _workers_queue.append(queue)


_workers_queue: list[ProgressQueue] = []  # of this worker process; a queue can be handed over at its start only


def _run_cell(cell: Config, place: int, resume: bool) -> Path:
    def report(metrics: Metrics) -> None:
        if (parent := parent_process()) is not None and not parent.is_alive():
            os._exit(1)  # killed; after a mere exception the worker would wait for its next cell for ever
        _workers_queue[0].put((place, metrics))

    return run(cell, report, resume)


def _relay(queue: ProgressQueue, futures: Sequence[Future[Path]], progress: Progress) -> None:
    """Hand the workers' metrics on until all have finished; the first failure is raised here."""
    while True:
        done = [future for future in futures if future.done()]
        for future in done:
            future.result()
        try:
            progress(*queue.get(timeout=0.1))
        except Empty:
            if len(done) == len(futures):
                return
