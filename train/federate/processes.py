"""Processes that end with the one that started them: each by its number, and what it started in turn."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Self

from sharding.errors import UserError
from train.interrupts import Stopped

log = logging.getLogger(__name__)

# Has the kernel end this process when its parent ends, even by SIGKILL, and becomes the program that is to be started.
TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
GRACE = 10.0  # seconds between asking a process to end and ending it


class Processes:
    """What was started here; all of it ends with this context, however that ends.

    Args:
        logs: folder for what each process prints, ``<name>.log``.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._known: dict[int, str] = {}  # every process seen below those, and when it began

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process of this name.

        Raises:
            UserError: there is no such program.
        """
        if which(command[0]) is None:
            raise UserError(f"there is no {command[0]}; pip install -e '.[flower]'")
        with (self._logs / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [*_tied_to(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C is for the one that started it
            )
        self._started[name] = process
        return process

    def pid(self, name: str) -> int:
        """Return the number of a process that was started."""
        return self._started[name].pid

    def ended(self) -> list[str]:
        """Return the names of those that have ended by themselves, and take note of what the others have started."""
        self._look()
        return [name for name, process in self._started.items() if process.poll() is not None]

    def stop(self) -> None:
        """Ask all to end, the last first, and end those that do not."""
        self._look()
        for process in reversed(self._started.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        end = monotonic() + GRACE
        while monotonic() < end and (any(p.poll() is None for p in self._started.values()) or self._left()):
            sleep(0.1)
        for process in self._started.values():
            process.kill()  # does nothing where it has ended
            process.wait()
        for number in self._left():
            log.debug("process %d did not end by itself", number)
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # what is ended now must be ended to the last
        self.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _look(self) -> None:
        table = _table()
        ours = {process.pid for process in self._started.values() if process.poll() is None} | self._left(table)
        while more := {number for number, (parent, _) in table.items() if parent in ours and number not in ours}:
            ours |= more
            self._known |= {number: table[number][1] for number in more}

    def _left(self, table: Mapping[int, tuple[int, str]] | None = None) -> set[int]:
        """Return which of the processes that ours have started are still there."""
        table = _table() if table is None else table
        return {number for number, began in self._known.items() if number in table and table[number][1] == began}


def _tied_to(parent: int) -> list[str]:
    """Return how a command begins whose process is to end with this parent; Flower's own see to theirs.

    Only Linux knows how; elsewhere a parent that is ended by SIGKILL leaves it running.
    """
    return [sys.executable, "-S", "-c", TIE, str(parent)] if sys.platform == "linux" else []


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _table() -> dict[int, tuple[int, str]]:
    """Return the parent of every process on this machine, and when it began, without those that have ended."""
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=True)
    rows = (line.split(maxsplit=3) for line in shown.stdout.splitlines())
    return {int(number): (int(parent), began) for number, parent, state, began in rows if not state.startswith("Z")}
