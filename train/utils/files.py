"""Atomic writes: a process that dies leaves the old file or the new one, never a part of it."""

import os
from contextlib import suppress
from pathlib import Path

from sharding.errors import UserError
from train.utils.errors import writing

UNFINISHED = ".unfinished"  # ends the name of a file while it is written


def write_atomically(path: Path, content: bytes, keep: Path | None = None, mode: int = 0o666) -> None:
    """Write a file atomically; it is on disk when this function returns, and readers see the old one until then.

    The old file is kept under the name `keep`. The process's mask limits the mode. Raise a RunError if the disk is full
    or not writable; the old file is then untouched.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    with writing(path):
        try:
            with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        if keep is not None and path.exists():
            path.replace(keep)
        unfinished.replace(path)
        sync_folder(path.parent)


def refuse_irregular(path: Path) -> None:
    """Raise a UserError that names a pipe, folder, socket or device."""
    with suppress(OSError):  # such as a loop of links; opening it tells
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no regular file; move it, or choose another directory")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if the system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
