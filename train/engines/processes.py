"""Train the cohort in several processes of one thread each, or on several GPUs."""

import logging
import os
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from threading import Thread
from typing import Any

import torch

from sharding import Plan
from sharding.errors import UserError
from sharding.failures import one_line
from sharding.plan import Client
from train.config.registries import import_parts
from train.engines.engine import Engine, Job, Updates
from train.engines.sequential import SequentialEngine
from train.engines.workers import AHEAD, Answer, answer, train_in_order
from train.utils.errors import REMEDY, RunError
from train.utils.signals import ENDING

UNGUARDED = (
    "the worker processes did not start: a script that trains does so under `if __name__ == '__main__':`, "
    "or with engine=sequential"
)


class ProcessesEngine(Engine):
    """Trains the clients in several processes, which end with the engine or with the parent process.

    Args:
        job: to train.
        num_workers: how many processes; by default one per GPU, or one per core without a GPU.

    Raises:
        UserError: the job has a part that cannot be sent to another process, e.g. a lambda; or the shared memory or
            the open files of this machine do not suffice.
        RunError: the processes do not start.
    """

    def __init__(self, job: Job, num_workers: int | None = None) -> None:
        count, self._device = num_workers or count_devices(job), job.device
        cpu_job = job.to("cpu")
        self._ahead = AHEAD * count
        context = context_of(__name__, "torch._dynamo")  # which torch imports at an optimizer's first step
        try:
            _check_picklable(cpu_job)
            devices = context.SimpleQueue()
            for index in range(count):
                devices.put(f"cuda:{index}" if job.device.type == "cuda" else "cpu")
            self._pool = ProcessPoolExecutor(count, context, _initialize_worker, (cpu_job, devices))
            self._pool.submit(os.getpid).result()  # starts them now, not in the first round
        except BrokenProcessPool as error:
            raise RunError(UNGUARDED) from error
        except (OSError, RuntimeError) as error:  # torch's own for shared memory is a RuntimeError
            raise UserError(
                f"worker processes cannot be started ({one_line(error)}): set engine=sequential, or allow more shared "
                "memory (docker run --shm-size=1g) or open files (ulimit -n 4096)"
            ) from error

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates in the order of the plan.

        Raises:
            RunError: a process died.
        """

        def send(client: Client, terms: bytes, dense: bytes) -> Future[Answer]:
            return self._pool.submit(_train, client, terms, dense, round, lr)

        try:
            yield from train_in_order(plan, self._device, self._ahead, bytes, send, Future.result)
        except BrokenProcessPool as error:
            raise RunError(f"a worker process died, perhaps because memory ran out; {REMEDY}") from error

    def close(self) -> None:
        """End the processes."""
        for worker in list((self._pool._processes or {}).values()):  # `kill_workers`, from Python 3.14 on
            worker.kill()
        self._pool.shutdown()


def _check_picklable(job: Job) -> None:
    try:
        ForkingPickler.dumps(job)
    except (AttributeError, TypeError, PicklingError) as error:
        raise UserError(
            f"model or dataset cannot be sent to other processes ({error}): "
            "define its functions and classes at the top level of a module, or set engine=sequential"
        ) from error


def start_method() -> str:
    """Return how processes are started: forked from a clean one, since one that has trained cannot be forked."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def context_of(*modules: str) -> Any:
    """Return the multiprocessing context; a fork server imports these modules first."""
    context: Any = get_context(start_method())
    if start_method() == "forkserver":
        context.set_forkserver_preload(list(modules))
    return context


def count_devices(job: Job) -> int:
    """Return how many processes can train a job in parallel: one per GPU if the data are on one, else one per core."""
    return torch.cuda.device_count() if job.device.type == "cuda" else num_cores()


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_engine: list[SequentialEngine] = []  # a worker's one engine


def _initialize_worker(job: Job, devices: Any) -> None:
    """Worker initializer: choose the device, use one thread, and ignore the signals that the parent handles."""
    logging.basicConfig(level=logging.getLogger().level, format="%(message)s", force=True)  # not on a parent's console
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    import_parts(job.plugins)
    _engine.append(SequentialEngine(job.to(devices.get())))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train(client: Client, terms: bytes, dense: bytes, round: int, lr: float) -> Answer:
    return answer(_engine[0], client, terms, dense, round, lr)
