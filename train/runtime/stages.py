"""Stages of a run before its first round, such as `reading cifar10`, reported through a separate logger."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_stages = logging.getLogger(__name__)
_stages.propagate = False  # stages are for the progress display, not for the log


def enter(stage: str) -> None:
    """Report the start of a stage."""
    _stages.info("%s", stage)


@contextmanager
def watched(show: Callable[[str], None]) -> Iterator[None]:
    """Pass each stage of this process to a function."""

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show(record.getMessage())

    handler, level = Shown(), _stages.level
    _stages.addHandler(handler)
    _stages.setLevel(logging.INFO)
    try:
        yield
    finally:
        _stages.removeHandler(handler)
        _stages.setLevel(level)
