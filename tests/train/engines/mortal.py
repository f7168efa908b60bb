"""Digits whose preparation ends or stops a Ray worker: the plugin of a run in which everything dies once."""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.train.runs import wait_until
from train.data import DATASETS
from train.data.digits import load_digits


def load_mortal(*, folder: str):
    """Return digits; the folder has the id of a `node` that dies, and the metrics of the `run`."""
    digits = load_digits()
    return replace(digits, prepare=partial(prepare, Path(folder), digits.prepare))


def prepare(folder, prepare_digits, inputs):
    """Prepare a batch; the first worker dies, and others stop on the doomed node, and in the second round."""
    if Path(sys.argv[0]).name == "default_worker.py":  # not the driver, which tests
        import ray

        if not (folder / "worker").exists():
            (folder / "worker").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if ray.get_runtime_context().get_node_id() == (folder / "node").read_text():
            (folder / "node reached").touch()
            wait_until(lambda: False)
        wait_until((folder / "node reached").exists)
        metrics = folder / "run" / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count("\n") == 1:
            (folder / "driver reached").touch()
            wait_until((folder / "driver dead").exists)
    return prepare_digits(inputs)


DATASETS["mortal"] = load_mortal
