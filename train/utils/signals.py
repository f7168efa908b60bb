"""Ctrl-C, SIGTERM and SIGHUP.

A run finishes its round and writes a checkpoint. A second Ctrl-C ends it at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(KeyboardInterrupt):
    """A signal, whose number is kept, asked a run to stop, and the run stopped after a round."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class StopRequest:
    """Whether to stop after the current round: the signal that asked for it, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def raise_if_set(self) -> None:
        """Raise `Stopped` if a signal asked to stop."""
        if self.signal is not None:
            raise Stopped(self.signal)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.signal == number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # closing must not be interrupted
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def withheld() -> Iterator[None]:
    """Block the signals that ask to stop; a process that starts inside never gets them, nor do its children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stop_on_request() -> Iterator[StopRequest]:
    """Record signals that ask to stop instead of ending at once. Only the main thread gets signals."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        if before[number] is not signal.SIG_IGN:  # as under nohup, or in a worker that another process ends
            signal.signal(number, request.handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
