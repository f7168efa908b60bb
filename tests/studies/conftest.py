"""Runs of a study in this process, so that a test need not wait for others to start."""

import pytest

from train.callbacks.stopping import DivergedError
from train.compare import FailedRun
from train.run import run


@pytest.fixture
def started(monkeypatch):
    """The folders' names of all runs that a study has started, in their order."""
    names = []

    def compare(cells, show, jobs, resume, stage):
        failures = {}
        for cell in cells:
            names.append(cell.directory.name)
            try:
                run(cell, resume=resume)
            except DivergedError as error:
                failures[str(cell.directory)] = FailedRun(str(error), diverged=True)
        return failures

    monkeypatch.setattr("train.cli.progress.compare", compare)
    return names
