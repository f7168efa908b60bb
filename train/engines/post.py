"""What processes send each other: orders to train bunches of clients, and parcels of what became of them.

Shards travel in their wire form. Workers that rank 0 started itself leave them in files in shared memory and send the
names through a pipe. Between torchrun's processes letters go by `torch.distributed` over gloo, through the hosts'
memory, as bytes that hold plain data: whoever reaches the port can say something wrong, but run nothing. (torchrun's
own rendezvous trusts its network: keep it on a private one.) On GPUs, and between hosts, that has never been run.
"""

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from sharding import Shard
from sharding.planner import Client
from train.engines import letters
from train.engines.base import Update
from train.engines.letters import Mail, Message, Parcel

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds that a worker may say nothing before that is told


class WorkerError(RuntimeError):
    """A worker process failed or died, in its own words where it left any."""


class Mailbox:
    """Wraps shards up: in files in a folder, or as bytes where sender and receiver share none.

    Args:
        folder: of all who share it, or None.
        rank: of the process whose mailbox this is; it keeps their files apart.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self.folder, self._rank, self._count = folder, rank, 0

    def wrap(self, shard: Shard) -> Mail:
        """Return what to send."""
        if self.folder is None:
            return shard.to_bytes()
        self._count += 1
        path = self.folder / f"{self._rank}-{self._count}"
        shard.write(path)
        return path

    def pack(self, client: Client, update: Update) -> tuple[Client, Mail | None, float | None, str | None]:
        """Return a client's entry in a parcel."""
        shard, loss = update.shard, update.loss
        mail = None if shard is None else self.wrap(shard)
        return client, mail, None if loss is None else float(loss), update.failure

    @staticmethod
    def unwrap(mail: Mail) -> Shard:
        """Return what was sent."""
        if isinstance(mail, bytes):
            return Shard.from_bytes(mail)
        shard = Shard.read(mail)
        mail.unlink()
        return shard


@dataclass(frozen=True)
class Pipe:
    """Carries messages, anything that can be pickled, to and from another process of this machine."""

    peer: int
    connection: Connection

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            WorkerError: the other process is gone.
        """
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerError(f"worker {self.peer} died") from error

    def receive(self) -> Any:
        """Wait for the next message; rank 0 says so when a worker keeps it waiting, ever more rarely.

        Raises:
            WorkerError: the other process is gone.
        """
        patience = PATIENCE
        try:
            while self.peer and not self.connection.poll(patience):
                log.warning("worker %d has sent nothing for %g s: it trains long, or was stopped", self.peer, patience)
                patience *= 2
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"worker {self.peer} died") from error


@dataclass(frozen=True)
class Gloo:
    """Does what `Pipe` does between processes that torchrun started, on whatever machine."""

    peer: int

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            WorkerError: the other process is gone.
        """
        letter = torch.frombuffer(bytearray(letters.write(message)), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([len(letter)]), self.peer)
            dist.send(letter, self.peer)
        except RuntimeError as error:
            raise WorkerError(f"worker {self.peer} died") from error

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            WorkerError: the other process is gone, or its letter cannot be read.
        """
        length = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(length, self.peer)
            letter = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(letter, self.peer)
        except RuntimeError as error:
            raise WorkerError(f"worker {self.peer} died") from error
        try:
            return letters.read(letter.numpy().tobytes())
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise WorkerError(f"worker {self.peer} sent what cannot be read: {error}") from error


Line = Pipe | Gloo


class Inbox:
    """Takes in a worker's parcels of a round while this process trains, one ahead of those that are asked for.

    Args:
        line: to the worker.
        count: how many there will be.
    """

    def __init__(self, line: Line, count: int) -> None:
        self._line = line
        self._parcels: Queue[Parcel | WorkerError] = Queue(1)
        Thread(target=self._take_in, args=(count,), daemon=True).start()

    def empty(self) -> bool:
        """Tell whether `get` would wait."""
        return self._parcels.empty()

    def get(self) -> Parcel:
        """Return the next parcel.

        Raises:
            WorkerError: the worker failed or died.
        """
        parcel = self._parcels.get()
        if isinstance(parcel, WorkerError):
            raise parcel
        if parcel.error is not None:
            raise WorkerError(f"worker {self._line.peer} failed:\n{parcel.error}")
        return parcel

    def _take_in(self, count: int) -> None:
        try:
            for _ in range(count):
                self._parcels.put(self._line.receive())
        except WorkerError as error:
            self._parcels.put(error)
