"""Small runs: what they are configured with, what they wrote, and how they are cut off."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree
from typing import Any

import cloudpickle
import pytest

from train.callbacks import EachRound
from train.cli.commands import main
from train.config.schema import Config, load_config
from train.run import run
from train.rundir.file_names import CHECKPOINT_FILE, METRICS_FILE

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = "tests/quickstart.yaml"
SMALL = ["rounds=2", "evaluate_every=1", "clients.count=40", "clients.per_round=3", "local.epochs=1"]
TINY = [*SMALL, "model={name: mlp, hidden: [16, 64, 16]}"]
RESNET = [*SMALL, "model.width=4", "model.groups=2", "model.blocks=[1, 1]"]
PATIENCE = 600.0  # seconds, for processes on a slow and busy machine; only a test that fails waits so long


def tiny(output, *overrides, shared: Sequence[str] = TINY) -> Config:
    """Configure a run of two rounds in this process."""
    return load_config(QUICKSTART, [*shared, "engine=sequential", f"output={output}", *overrides])


def read(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


def without_times(lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if not _is_time(key)} for line in lines]


def _is_time(key: str) -> bool:
    """Tell `seconds…`, also of one model as `one/seconds…`; simulated seconds are a result."""
    return key.rpartition("/")[2].startswith("seconds")


def model_of(directory: Path) -> bytes:
    return (directory / CHECKPOINT_FILE).read_bytes()


def assert_same(directory: Path, whole: Path) -> None:
    """Check that two runs came to the same metrics and the same bits."""
    assert without_times(read(directory)) == without_times(read(whole))
    assert model_of(directory) == model_of(whole)


def in_a_process(action: Callable[[], object]) -> int:
    """Do something in a process of its own, and return its exit code; negative where a signal ended it.

    A process that nothing has trained in: what torch has started elsewhere does not survive a fork.
    """
    context: Any = get_context("forkserver")
    process = context.Process(target=_perform, args=(cloudpickle.dumps(action),))
    process.start()
    process.join()
    return process.exitcode


def _perform(action: bytes) -> None:
    cloudpickle.loads(action)()


class Death(BaseException):
    """Ends a run where a process would die; the program handles exceptions, and none of this class."""


def cut_off(config: Config, after: int) -> None:
    """Leave what a run has written when that round is done, as if it had died then."""
    elsewhere = config.directory.with_name(f"{config.directory.name}-before")

    def die(metrics):
        if metrics["round"] == after:
            copytree(elsewhere, config.directory)
            raise Death

    with pytest.raises(Death):
        run(config.model_copy(update={"output": elsewhere}), [EachRound(die)])


def count_writes(config, kill_at=None, resume=False):
    """Run, and return how many moments there are before and after an `fsync` or a renaming; die at one of them."""
    passed = 0

    def counting(function):
        def counted(*args):
            nonlocal passed
            for step in (lambda: None, lambda: function(*args)):
                result = step()
                if passed == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                passed += 1
            return result

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", counting(os.fsync))
        patch.setattr(Path, "replace", counting(Path.replace))
        run(config, resume=resume)
    return passed


def cut_off_and_resumed(config: Config, after: int) -> Path:
    """Return the directory of a run that dies after that round, and is resumed."""
    cut_off(config, after)
    return run(config, resume=True)


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; fail if it does not in time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


def refused(capsys, words: Sequence[str], *named: str) -> None:
    """Run a command that must end with one line that names these, with exit code 2, and write nothing."""
    before = sorted(Path().rglob("*"))
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 2100
    assert [word for word in named if word not in error] == []
    assert "━" not in out
    assert sorted(Path().rglob("*")) == before
