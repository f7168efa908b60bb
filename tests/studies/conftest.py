"""Runs of a study in this process, so that a test need not wait for others to start."""

import pandas as pd
import pytest

from studies.curves import COLUMNS
from train.callbacks.stopping import DivergedError
from train.run import run
from train.sweep import FailedRun


@pytest.fixture
def started(monkeypatch):
    """The folders' names of all runs that a study has started, in their order."""
    names = []

    def sweep(configs, on_round, jobs, resume, on_stage):
        failures = {}
        for config in configs:
            names.append(config.directory.name)
            try:
                run(config, resume=resume)
            except DivergedError as error:
                failures[config.directory] = FailedRun(str(error), is_diverged=True)
        return failures

    monkeypatch.setattr("train.progress.sweep", sweep)
    return names


@pytest.fixture
def curves_of():
    """Return a function that makes curves of runs, each a list of rows with some of the columns; the others are NaN."""

    def make(runs, columns=COLUMNS):
        rows = [
            {"run": run, "rounds": t, **row} for run, rounds in runs.items() for t, row in enumerate(rounds, start=1)
        ]
        return pd.DataFrame(rows, columns=["run", *columns])

    return make
