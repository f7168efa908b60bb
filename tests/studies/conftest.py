"""Curves of runs that were not trained."""

import pandas as pd
import pytest

from studies.curves import COLUMNS


@pytest.fixture
def curves_of():
    """Return a function that makes curves of runs, each a list of rows with some of the columns; the others are NaN."""

    def make(runs, columns=COLUMNS):
        rows = [
            {"run": run, "rounds": t, **row} for run, rounds in runs.items() for t, row in enumerate(rounds, start=1)
        ]
        return pd.DataFrame(rows, columns=["run", *columns])

    return make
