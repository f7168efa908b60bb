"""Stages of a run before its first round, such as `reading cifar10`, reported to listeners."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


def set_stage(stage: str) -> None:
    """Report the start of a stage."""
    for show in _listeners:
        show(stage)


@contextmanager
def stage_listener(show: Callable[[str], None]) -> Iterator[None]:
    """Pass each stage of this process to a function."""
    _listeners.append(show)
    try:
        yield
    finally:
        _listeners.remove(show)
