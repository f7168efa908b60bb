"""Errors that end a run although its configuration is right."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMEDY = "the same command with --resume continues from the last checkpoint"


class RunError(RuntimeError):
    """A run cannot continue; one line says why, and what to do. The exit code is 1."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a disk that is full, read-only or gone into one line.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; when it can be written, {REMEDY}") from error
