"""Train the cohort in several processes of one thread each, or on several GPUs.

The processes read the model and the data from one temporary file, which they map into memory. So all of them share one
copy, and no open file for each tensor is needed. Shards and updates go through `shared_memory`.
"""

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from pathlib import Path
from pickle import PicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sharding import Plan, Shard
from sharding.errors import UserError
from sharding.rounds.plan import Client
from train.engines.engine import Engine, Job, Replies
from train.engines.sequential import SequentialEngine
from train.engines.shared_memory import SharedMemory, put, room, take
from train.engines.workers import AHEAD, Encoded, Result, train_client, train_in_order
from train.registries import import_parts
from train.utils.errors import REMEDY, RunError
from train.utils.signals import ENDING, withheld

UNGUARDED = (
    "the worker processes did not start: a script that trains does so under `if __name__ == '__main__':`, "
    "or with engine=sequential"
)
UNSENDABLE = (
    "model or dataset cannot be sent to other processes ({}): define its functions and classes at the top level of a "
    "module, without parametrizations, or set engine=sequential"
)
JOB = "job.pt"
TOO_FEW_FILES = (errno.EMFILE, errno.ENFILE)


class ProcessesEngine(Engine):
    """Trains the clients in several processes, which end with the engine or with the parent process.

    Args:
        job: the job to train.
        num_workers: the number of processes; by default one per GPU that may be used, or one per core without a GPU.

    Raises:
        UserError: the job has a part that cannot be sent to another process, e.g. a lambda; it cannot be written to the
            temporary folder; or the system does not allow it, e.g. with too few open files or a read-only /dev/shm.
        RunError: the processes do not start.
    """

    def __init__(self, job: Job, num_workers: int | None = None) -> None:
        count, self._device = num_workers or count_devices(job), job.device
        self._ahead = AHEAD * count
        self._latest: dict[int, Future[Encoded]] = {}  # by slot, the training that used it last
        parts = sorted({type(part).__module__ for part in job.model.modules()} - {"__main__"})  # timm's and others
        try:
            context = context_of(__name__, *parts)
            with _saved(job) as folder:
                self._memory, shared = SharedMemory.create(folder)
                devices, all_ready = context.SimpleQueue(), context.Barrier(count)
                for index in range(count):
                    devices.put(device_of(job, index))
                arguments = (job.plugins, folder, shared, devices, all_ready)
                self._pool = ProcessPoolExecutor(count, context, _initialize_worker, arguments)
                self._start(count)
        except (OSError, ImportError) as error:  # Python raises the latter where a system has no semaphores
            too_few = isinstance(error, OSError) and error.errno in TOO_FEW_FILES
            raise UserError(
                f"worker processes cannot be started ({getattr(error, 'strerror', None) or error}): set "
                f"engine=sequential{', or allow more open files (ulimit -n 4096)' if too_few else ''}"
            ) from error

    def _start(self, count: int) -> None:
        """Start the processes and wait until each has read the job. If one fails, end the others."""
        try:
            for ready in [self._pool.submit(_wait_for_all) for _ in range(count)]:
                ready.result()
        except BaseException as error:
            self.close()
            if isinstance(error, BrokenProcessPool):
                raise RunError(UNGUARDED) from error
            raise

    def train(self, plan: Plan, round: int, lr: float) -> Replies:
        """Yield the clients' replies in the order of the plan.

        Raises:
            RunError: a process died.
        """
        wait_for(self._latest.values())  # those of a round that was left still write to their slots
        size = max((room(plan.template(clients[0])) for clients in plan.groups.values()), default=0)
        free = list(range(1, self._ahead + 1))  # slots; the first has what all clients share

        def share(common: Shard) -> bytes:
            return put(common, self._memory.slot(0, size))

        def send(client: Client, terms: Shard, common: bytes) -> tuple[int, Future[Encoded]]:
            slot = free.pop()
            rest = put(terms, self._memory.slot(slot, size))
            self._latest[slot] = self._pool.submit(_train, client, rest, common, slot, size, round, lr)
            return slot, self._latest[slot]

        def wait(ticket: tuple[int, Future[Encoded]]) -> Result:
            slot, future = ticket
            rest, loss, failure = future.result()
            free.append(slot)
            update = None if rest is None else take(rest, self._memory.slot(slot, size)).map(torch.clone)
            return update, loss, failure

        try:
            yield from train_in_order(plan, self._device, self._ahead, share, send, wait)
        except BrokenProcessPool as error:
            raise RunError(f"a worker process died, perhaps because memory ran out; {REMEDY}") from error

    def close(self) -> None:
        """End the processes."""
        self._memory.close()
        for worker in list((self._pool._processes or {}).values()):  # `kill_workers`, from Python 3.14 on
            worker.kill()
        self._pool.shutdown()


@contextmanager
def _saved(job: Job) -> Iterator[Path]:
    """Write what the processes train to a file of a temporary folder, which is removed when they have opened it.

    Raises:
        UserError: a part cannot be sent to another process, or the file cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="sharding-")))
            with (folder / JOB).open("wb") as stream:
                torch.save(job.to("cpu"), stream)
        except (AttributeError, TypeError, PicklingError, OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch hides the reason
            if isinstance(cause, OSError):
                raise UserError(
                    f"the temporary file of the worker processes cannot be written ({cause.strerror}): set "
                    "engine=sequential, or TMPDIR to a folder with space"
                ) from error
            raise UserError(UNSENDABLE.format(error)) from error
        yield folder


def start_method() -> str:
    """Return how processes are started: forked from a clean one, since one that has trained cannot be forked."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def context_of(*modules: str) -> Any:
    """Return the multiprocessing context; a fork server imports these modules first, and what all training needs.

    The signals that ask to stop may reach all processes of a group, as from a job scheduler. Were they to end the fork
    server, its processes would count as dead. They inherit that these signals are blocked.
    """
    context: Any = get_context(start_method())
    if start_method() == "forkserver":
        context.set_forkserver_preload(["torch._dynamo", *modules])  # torch imports it at an optimizer's first step
        for helper in (resource_tracker, forkserver):
            with withheld():  # of each, since the start of the tracker unblocks two of them here
                helper.ensure_running()
    return context


def count_devices(job: Job) -> int:
    """Return how many processes can train a job in parallel: one per GPU if the data are on one, else one per core."""
    if job.device.type != "cuda":
        return num_cores()
    return 1 if job.one_device else torch.cuda.device_count()


def device_of(job: Job, index: int) -> str:
    """Return the device of the process of this index."""
    if job.device.type != "cuda":
        return "cpu"
    return str(job.device) if job.one_device else f"cuda:{index}"


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_engine: list[SequentialEngine] = []  # a worker's one engine
_memory: list[SharedMemory] = []  # of the messages
_ready: list[threading.Barrier] = []  # at which the workers wait until all have read the job


def _initialize_worker(
    plugins: Sequence[str], folder: Path, shared: Path, devices: Any, all_ready: threading.Barrier
) -> None:
    """Worker initializer: choose the device, use one thread, and ignore the signals that the parent handles."""
    logging.basicConfig(level=logging.getLogger().level, format="%(message)s", force=True)  # not on a parent's console
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    import_parts(plugins)
    _memory.append(SharedMemory(os.open(shared, os.O_RDWR)))
    job: Job = torch.load(folder / JOB, mmap=True, weights_only=False)
    _engine.append(SequentialEngine(job.to(devices.get())))
    _ready.append(all_ready)


def _end_with_parent() -> None:
    """End with the process that sends the work, or with the fork server, without which it takes this one for dead."""
    parent, server = parent_process(), os.getppid()
    assert parent is not None
    while parent.is_alive() and os.getppid() == server:
        parent.join(1.0)
    os._exit(1)


def _wait_for_all() -> None:
    """Wait until every process has read the job; so each process gets one of these calls."""
    _ready[0].wait()


def _train(client: Client, terms: bytes, common: bytes, slot: int, size: int, round: int, lr: float) -> Encoded:
    """Train a client on the shard in a slot, and leave the update there."""
    memory = _memory[0].slot(slot, size)
    shared = take(common, _memory[0].slot(0, size))
    update, loss, failure = train_client(_engine[0], client, take(terms, memory).map(torch.clone), shared, round, lr)
    return None if update is None else put(update, memory), loss, failure
