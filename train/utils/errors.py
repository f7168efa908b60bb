"""Errors that end a run although its configuration is valid."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMEDY = "the same command with --resume continues from the last checkpoint"


class RunError(RuntimeError):
    """A run cannot continue; the one-line message gives the reason and the remedy. The exit code is 1."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors in writing, such as a full disk, into a RunError of one line."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; when it can be written, {REMEDY}") from error
