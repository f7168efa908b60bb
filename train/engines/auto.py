"""The choice of an engine that nobody has to make."""

from multiprocessing import parent_process
from time import perf_counter

import torch
import torch.distributed as dist

from sharding import Plan
from train.engines.base import Engine, Job, Updates
from train.engines.processes import ProcessesEngine
from train.engines.stacked import StackedEngine
from train.engines.workers import num_cores, start_method

PATIENCE = {"fork": 0.0, "spawn": 10.0}  # seconds of training after which it is worth while to start workers so


def auto_engine(job: Job) -> Engine:
    """Return the fastest engine: `processes` under torchrun, `stacked` on a GPU, else `AutoEngine`."""
    if dist.is_initialized():
        return ProcessesEngine(job)
    return StackedEngine(job) if job.dataset.test.targets.is_cuda else AutoEngine(job)


class AutoEngine:
    """Trains in several processes, once training has taken long enough to pay for starting them.

    The clock may decide this, because it does not show in any result: `processes` and `stacked` in one thread give the
    same bits. In a process that shares the machine with others (a worker of `compare`) no workers are started.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine: Engine = StackedEngine(job)
        self._seconds = 0.0
        self._alone = num_cores() > 1 and parent_process() is None
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates."""
        if self._alone and self._seconds >= PATIENCE[start_method()]:
            self._engine, self._alone = ProcessesEngine(self._job), False
        start = perf_counter()
        yield from self._engine.train(plan, round, lr)
        self._seconds += perf_counter() - start

    def close(self) -> None:
        """End the workers, if there are any."""
        self._engine.close()
        torch.set_num_threads(self._threads)
