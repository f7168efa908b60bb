"""Processes that end with the process that started them, together with their own children."""

import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from time import monotonic, sleep
from types import FrameType
from typing import Self

import psutil

from sharding.errors import UserError
from train.utils.signals import Stopped

log = logging.getLogger(__name__)

GRACE = 10.0  # seconds between asking a process to end and killing it


class Processes:
    """A context whose processes all end with it.

    Args:
        logs: folder for the output of each process, ``<name>.log``.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.started: dict[str, psutil.Popen] = {}
        self._below: set[psutil.Process] = set()  # every process seen below those

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process of this name. Linux also kills it when this process is killed.

        Raises:
            UserError: there is no such program.
        """
        if (program := which(command[0], path=environment.get("PATH"))) is None:
            raise UserError(f"{command[0]} is not installed; pip install -e '.[federate]'")
        setpriv = which("setpriv")
        tie = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        with (self._logs / f"{name}.log").open("ab") as output:
            self.started[name] = psutil.Popen(
                [*tie, program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C is for the process that started it
            )

    def ended(self) -> dict[str, int]:
        """Return the exit codes of the processes that have ended, and record the children of the others."""
        for process in self.started.values():
            with suppress(psutil.NoSuchProcess):
                self._below.update(process.children(recursive=True))
        return {name: code for name, process in self.started.items() if (code := process.poll()) is not None}

    def stop(self) -> None:
        """Ask all processes to end, the first, which the others call, after them; kill those that do not."""
        ended, end = self.ended(), monotonic() + GRACE
        running = [process for name, process in self.started.items() if name not in ended]
        for processes in (running[1:], running[:1]):
            for process in processes:
                process.terminate()
            while any(map(_lives, processes)) and monotonic() < end:
                sleep(0.1)
        while (left := [*filter(_lives, (*running, *self._below))]) and monotonic() < end:
            sleep(0.1)
        for process in left:
            log.debug("process %d did not end and was killed", process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in running:
            process.wait()

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # all processes must end
        self.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
