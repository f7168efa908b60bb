"""What a run does before its first round, as `reads cifar10`, told to whoever watches, through a logger of its own."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_stages = logging.getLogger(__name__)
_stages.propagate = False  # they are for those who watch, not for the log


def enter(stage: str) -> None:
    """Tell that a stage begins: what is being done, in a few words."""
    _stages.info("%s", stage)


@contextmanager
def watched(show: Callable[[str], None]) -> Iterator[None]:
    """Have each stage of this process shown as it begins."""

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
