"""The processes that train for that of rank 0: started here, one a core, or by torchrun."""

import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Queue
from shutil import disk_usage, rmtree
from tempfile import gettempdir, mkdtemp
from threading import Thread
from time import time
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist

from sharding.errors import UserError
from train.engines.base import Job
from train.engines.letters import Order, Parcel
from train.engines.post import Gloo, Line, Mailbox, Pipe, WorkerError
from train.engines.stacked import StackedEngine
from train.interrupts import ENDING

TIMEOUT = timedelta(days=7)  # a process that dies closes its connections, which is seen at once; long training is fine
ROOM = 2**32  # bytes of shared memory below which shards lie on disk: some containers have but a few MB
SHARED_MEMORY, FOLDERS = "/dev/shm", "spectral-sharding-"
UNTOUCHED = 3600.0  # seconds after which a folder of a process that is not there is taken for left behind
AHEAD = 2  # bunches that a process may have finished before it is their turn in the sum


class Workers:
    """Processes on this machine that serve the engine of this one, each with one thread.

    Attributes:
        lines: to each of them.
        folder: for what they and this process leave each other.
        stop: ends them. So does the end of this object, and that of this process, however it ends.
    """

    def __init__(self, job: Job, num_workers: int) -> None:
        if job.dataset.test.targets.is_cuda:
            raise UserError(
                "engine=processes shares GPUs out under torchrun: torchrun --nproc-per-node K -m train run …"
            )
        clear_folders()
        self.folder = Path(mkdtemp(prefix=f"{FOLDERS}{os.getpid()}-", dir=_memory()))
        self.lines: list[Pipe] = []
        processes: list[BaseProcess] = []
        self.stop = finalize(self, _end, processes, self.folder)
        import_module("torch._dynamo")  # as the first optimizer would: here once, for all that are forked
        gc.freeze()  # the collector would write to all that they share, and so copy it
        context: Any = get_context(start_method())
        for rank in range(1, num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(job, rank, self.folder, theirs, ours), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            self.lines.append(Pipe(rank, ours))


def clear_folders() -> None:
    """Remove what runs left in shared memory that were killed together with their workers.

    Only folders that nobody has touched for a while are taken: a container that shares the memory has processes of its
    own, which cannot be seen from here.
    """
    for place in filter(None, {SHARED_MEMORY, gettempdir()}):
        for folder in Path(place).glob(f"{FOLDERS}*-*"):
            with suppress(OSError, ValueError):
                owner = int(folder.name.removeprefix(FOLDERS).partition("-")[0])
                if time() - folder.stat().st_mtime > UNTOUCHED and not _lives(owner):
                    rmtree(folder, ignore_errors=True)


def start_method() -> str:
    """Return how workers are started: forked where that is safe, for then they are up at once and share our memory.

    That is what torch's own `DataLoader` does on Linux. A process that may use a GPU cannot be forked.
    """
    return "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def launched() -> Iterator[int]:
    """Join the other processes if torchrun started this one, and yield its rank; 0 without torchrun.

    When rank 0 leaves in peace, it sends the others home. After an exception torchrun ends them.
    """
    if not dist.is_torchelastic_launched():
        yield 0
        return
    dist.init_process_group("gloo", timeout=TIMEOUT)
    yield dist.get_rank()
    for other in range(1, dist.get_world_size()) if dist.get_rank() == 0 else ():
        Gloo(other).send(None)
    dist.destroy_process_group()


def serve(job: Job, line: Line, mailbox: Mailbox) -> None:
    """Train what rank 0 orders until it sends home, or is no more; the whole life of any other rank."""
    engine = StackedEngine(job)
    parcels: Queue[Parcel | None] = Queue(AHEAD)
    post = Thread(target=_post, args=(parcels, line, mailbox), daemon=True)
    post.start()
    try:
        while (order := line.receive()) is not None:
            for parcel in _carry_out(order, engine, mailbox):
                parcels.put(parcel)
    except WorkerError:  # rank 0 is gone, and has said why
        return
    except Exception:
        parcels.put(Parcel((), traceback.format_exc()))
        raise
    finally:
        parcels.put(None)
        post.join()


def _carry_out(order: Order, engine: StackedEngine, mailbox: Mailbox) -> Iterator[Parcel]:
    device = engine.job.dataset.test.targets.device
    whole = mailbox.unwrap(order.dense).to(device)
    shards = {}
    for client, mail in order.terms.items():
        shard = mailbox.unwrap(mail).to(device)
        shards[client] = replace(shard, dense=whole.dense, frozen=shard.frozen | whole.frozen)
    for bunch in order.bunches:
        updates = engine.train_bunch(bunch, shards, order.round, order.lr)
        yield Parcel([mailbox.pack(client, update) for client, update in updates])


def _post(parcels: "Queue[Parcel | None]", line: Line, mailbox: Mailbox) -> None:
    """Send finished bunches while the next ones are in training."""
    try:
        while (parcel := parcels.get()) is not None:
            line.send(parcel)
    except WorkerError:
        _vanish(mailbox)  # rank 0 is gone; nobody waits for what is in training


def _end(processes: Sequence[BaseProcess], folder: Path) -> None:
    for process in processes:
        process.kill()
        process.join()
    rmtree(folder, ignore_errors=True)
    gc.unfreeze()


def _work(job: Job, rank: int, folder: Path, connection: Connection, other_end: Connection) -> None:
    """Live as a worker that `Workers` started."""
    other_end.close()  # else a worker would never see that rank 0, the only one to hold it, is gone
    logging.basicConfig(level=logging.getLogger().level, format="%(message)s", force=True)  # not by rank 0's console
    for ending in ENDING:  # may reach all; a worker ends with rank 0, and clears up after it
        signal.signal(ending, signal.SIG_IGN)
    torch.set_num_threads(1)  # as rank 0 does: more would round otherwise
    mailbox = Mailbox(folder, rank)
    serve(job, Pipe(0, connection), mailbox)
    _vanish(mailbox)


def _vanish(mailbox: Mailbox) -> None:
    """End at once, not through gloo's own farewell, which would wait for a rank 0 that may be gone."""
    if mailbox.folder is not None:
        rmtree(mailbox.folder, ignore_errors=True)
    os._exit(0)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _memory() -> str | None:
    """Return the folder that lies in memory, if there is one with room; None for the one of temporary files."""
    writable = os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if writable and disk_usage(SHARED_MEMORY).free > ROOM else None
