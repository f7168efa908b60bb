"""Runs that are cut off, in processes of their own."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from train.checkpoint import MODEL_FILE
from train.run import run


def ignore(metrics):
    pass


def in_a_fork(action: Callable[[], object]) -> int:
    """Do something in a process of its own, and return its exit code; negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            action()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(config, moment: int, resume: bool = False) -> bool:
    """Run in a process that is killed at that moment, of all at which something comes to the disk; tell whether it was.

    The moments are before and after every `fsync` and every renaming.
    """
    passed = 0

    def counting(function):
        def counted(*args):
            nonlocal passed
            for step in (lambda: None, lambda: function(*args)):
                result = step()
                if passed == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                passed += 1
            return result

        return counted

    def action():
        os.fsync, Path.replace = counting(os.fsync), counting(Path.replace)
        run(config, ignore, resume)

    code = in_a_fork(action)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def cut_off(config, after: int):
    """Run until that round is done and written, then die."""

    def die(metrics):
        if metrics["round"] == after:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_fork(lambda: run(config, die)) == -signal.SIGKILL


def model_of(directory: Path) -> bytes:
    return (directory / MODEL_FILE).read_bytes()
