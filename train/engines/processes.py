"""Train the cohort in several processes of one thread each, or on several GPUs.

Each process trains whole clients as `sequential` does, and updates are handed on in the order of the plan: the result
is that of `sequential`, bit for bit, for any number of processes. Shards travel in their wire form, in shared memory.
"""

import logging
import os
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import zip_longest
from multiprocessing import get_context, parent_process
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from sharding import Plan, Shard
from sharding.errors import Failure, UserError
from sharding.planner import Client
from train.config.registries import import_parts
from train.engines.base import Job, Update, Updates
from train.engines.sequential import SequentialEngine
from train.runtime.errors import REMEDY, RunError
from train.runtime.signals import ENDING

AHEAD = 4  # clients queued per process: enough to keep it busy, with memory independent of the cohort's size

UNGUARDED = (
    "the worker processes did not start: a script that trains does so under `if __name__ == '__main__':`, "
    "or with engine=sequential"
)

Answer = tuple[Tensor | None, float | None, Failure | None]  # a packed shard, its loss, why the client failed


class ProcessesEngine:
    """Trains the clients in several processes, which end with the engine, and with the process that made it.

    Args:
        job: what there is to train.
        num_workers: how many processes; by default one per GPU, or one per core without a GPU.

    Raises:
        UserError: the job has a part that cannot be sent to another process, e.g. a lambda.
        RunError: the processes do not start.
    """

    def __init__(self, job: Job, num_workers: int | None = None) -> None:
        count, self._device = num_workers or count_devices(job), job.device
        _must_be_sendable(job)
        self._ahead = AHEAD * count
        context: Any = get_context(start_method())
        if start_method() == "forkserver":
            # Modules that each worker would import; torch imports `_dynamo` at an optimizer's first step.
            context.set_forkserver_preload([__name__, "torch._dynamo"])
        devices = context.SimpleQueue()
        for place in range(count):
            devices.put(f"cuda:{place}" if job.device.type == "cuda" else "cpu")
        self._pool = ProcessPoolExecutor(count, context, _begin, (job.to("cpu"), devices))
        try:
            self._pool.submit(os.getpid).result()  # starts them now, not in the first round
        except BrokenProcessPool as error:
            raise RunError(UNGUARDED) from error

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates in the order of the plan.

        Raises:
            RunError: a process died.
        """
        order = list(plan)
        if not order:
            return
        dense = pack(replace(plan[order[0]], terms={}))

        def submit(client: Client) -> Future[Answer]:
            return self._pool.submit(_train, client, pack(replace(plan[client], dense={})), dense, round, lr)

        try:
            futures = {client: submit(client) for client in order[: self._ahead]}
            for client, later in zip_longest(order, order[self._ahead :]):
                shard, loss, failure = futures.pop(client).result()
                if later is not None:
                    futures[later] = submit(later)
                yield client, self._update(shard, loss, failure)
        except BrokenProcessPool as error:
            raise RunError(f"a worker process died, perhaps because memory ran out; {REMEDY}") from error

    def close(self) -> None:
        """End the processes."""
        for worker in list((self._pool._processes or {}).values()):  # `kill_workers`, from Python 3.14 on
            worker.kill()
        self._pool.shutdown()

    def _update(self, shard: Tensor | None, loss: float | None, failure: Failure | None) -> Update:
        return Update(
            None if shard is None else unpack(shard).to(self._device),
            None if loss is None else torch.tensor(loss, device=self._device),
            failure,
        )


def _must_be_sendable(job: Job) -> None:
    try:
        ForkingPickler.dumps(job.to("cpu"))
    except (AttributeError, TypeError, PicklingError) as error:
        raise UserError(
            f"model or dataset cannot be sent to other processes ({error}): "
            "define its functions and classes at the top level of a module, or set engine=sequential"
        ) from error


def start_method() -> str:
    """Return how processes are started: forked from a clean one, since one that has trained cannot be forked."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def count_devices(job: Job) -> int:
    """Return how many processes can train a job in parallel: one per GPU if the data are on one, else one per core."""
    return torch.cuda.device_count() if job.device.type == "cuda" else num_cores()


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pack(shard: Shard) -> Tensor:
    """Return the wire form of a shard as one tensor, (bytes,), which goes to another process by shared memory."""
    return torch.frombuffer(bytearray(shard.to_bytes()), dtype=torch.uint8)


def unpack(packed: Tensor) -> Shard:
    """Return what was packed."""
    return Shard.from_bytes(packed.numpy().tobytes())


_engine: list[SequentialEngine] = []  # a worker's one engine


def _begin(job: Job, devices: Any) -> None:
    """Begin the life of a worker: on the next device, in one thread, deaf to signals that its parent heeds."""
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


def _train(client: Client, terms: Tensor, dense: Tensor, round: int, lr: float) -> Answer:
    """Train a client in a worker, on its own terms and the dense rest that a round's clients have in common."""
    own, rest = unpack(terms), unpack(dense)
    shard = replace(own, dense=rest.dense, frozen=own.frozen | rest.frozen).to(_engine[0].job.device)
    update = _engine[0].train_client(client, shard, round, lr)
    packed = None if update.shard is None else pack(update.shard)
    return packed, None if update.loss is None else float(update.loss), update.failure
