"""Processes that end with the one that started them, and with them all that they have started in turn."""

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

import psutil

from sharding.errors import UserError
from train.runtime.signals import Stopped

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
        self._started: dict[str, psutil.Popen] = {}
        self._below: set[psutil.Process] = set()  # every process seen below those

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process of this name; only on Linux does it end where this one is ended by SIGKILL.

        Raises:
            UserError: there is no such program.
        """
        if (program := which(command[0])) is None:
            raise UserError(f"there is no {command[0]}; pip install -e '.[flower]'")
        tie = [sys.executable, "-S", "-c", TIE, str(os.getpid())] if sys.platform == "linux" else []
        with (self._logs / f"{name}.log").open("ab") as output:
            self._started[name] = psutil.Popen(
                [*tie, program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C is for the one that started it
            )

    def pid(self, name: str) -> int:
        """Return the number of a process that was started."""
        return int(self._started[name].pid)

    def ended(self) -> dict[str, int]:
        """Return the exit codes of those that have ended, and take note of what the others have started."""
        for process in self._started.values():
            with suppress(psutil.NoSuchProcess):
                self._below.update(process.children(recursive=True))
        return {name: code for name, process in self._started.items() if (code := process.poll()) is not None}

    def stop(self) -> None:
        """Ask all to end, the last first, and end those that do not."""
        running = [process for name, process in self._started.items() if name not in self.ended()]
        for process in reversed(running):
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        end = monotonic() + GRACE
        while (left := [process for process in (*running, *self._below) if _lives(process)]) and monotonic() < end:
            sleep(0.1)
        for process in left:
            log.debug("process %d did not end by itself", process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in running:
            process.wait()

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


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
