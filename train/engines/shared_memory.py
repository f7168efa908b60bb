"""Messages between processes: tensors lie in memory that the processes share, and the rest crosses a pipe.

Through the pipe a large update would be copied six times, in pieces of 64 kB.
"""

import os
import pickle
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any, Self
from weakref import finalize

import torch
from torch import Tensor

from sharding.rounds.codec import Message

ALIGNMENT = 64  # bytes; a tensor of any type may begin at a multiple of it


class SharedMemory:
    """Memory that several processes map, each by the same file; it ends with the last of them.

    Args:
        file: the descriptor of the file, open for reading and writing, which it closes.

    Attributes:
        close: closes the file. What is mapped stays.
    """

    def __init__(self, file: int) -> None:
        self._file, self._memory = file, torch.empty(0, dtype=torch.uint8)
        self.close = finalize(self, os.close, file)

    @classmethod
    def create(cls, folder: Path) -> tuple[Self, Path]:
        """Return new memory, and the path by which other processes open its file.

        The file has no disk where the system allows it; else it is in the folder. The memory of `multiprocessing` is
        too small in a container (64 MB in Docker's), and stays where a process is killed.
        """
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("sharding")
            return cls(file), Path(f"/proc/{os.getpid()}/fd/{file}")
        path = folder / "memory"
        return cls(os.open(path, os.O_RDWR | os.O_CREAT)), path

    def slot(self, index: int, size: int) -> Tensor:
        """Return one of consecutive slots of the same size, uint8; the memory grows for it."""
        end = (index + 1) * size
        if end > len(self._memory):
            if os.fstat(self._file).st_size < end:
                os.ftruncate(self._file, end)
            self._memory = torch.frombuffer(mmap(self._file, 0), dtype=torch.uint8)
        return self._memory[index * size : end]


def room(message: Message) -> int:
    """Return the bytes that a message with these shapes and types takes in a slot."""
    sizes: list[int] = []

    def note(part: Tensor) -> Tensor:
        sizes.append(_aligned(part.nbytes))
        return part

    message.map(note)
    return sum(sizes)


def put(message: Message, slot: Tensor) -> bytes:
    """Copy a message's tensors into a slot, and return the rest: all else, their shapes and types."""
    place = _places(slot)

    def write(part: Tensor) -> Tensor:
        form = torch.empty(part.shape, dtype=part.dtype, device="meta")
        place(form).copy_(part)
        return form

    return pickle.dumps(message.map(write))


def take(rest: bytes, slot: Tensor) -> Any:
    """Return the message whose tensors are in a slot; clone what is used after the next `put`."""
    return pickle.loads(rest).map(_places(slot))


def _places(slot: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that returns the place in the slot of one tensor after the other."""
    begin = 0

    def place(form: Tensor) -> Tensor:
        nonlocal begin
        part = slot[begin : begin + form.nbytes].view(form.dtype).view(form.shape)
        begin += _aligned(form.nbytes)
        return part

    return place


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
