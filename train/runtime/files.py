"""Files that are written whole: a process that dies leaves the old file or the new one, never a part."""

import os
from contextlib import suppress
from pathlib import Path

from train.runtime.errors import writing

UNFINISHED = ".tmp"


def write_whole(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Write a file, which is on disk when this returns; readers see the old one until then.

    Args:
        path: of the file.
        content: of the file.
        keep: what to call the old one, if it is to be kept.

    Raises:
        RunError: the disk is full, or takes no writing; the old file is untouched.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    with writing(path):
        try:
            with unfinished.open("wb") as file:
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


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
