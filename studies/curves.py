"""Curves of a study's runs: one CSV row per evaluation, from which tables and pictures are made again.

In memory they are frames. A number that does not exist is NaN.
"""

from collections.abc import Iterable, Sequence
from math import isnan
from pathlib import Path

import pandas as pd

from train.report.text import mean_and_spread
from train.utils.files import write_atomically

COLUMNS = (  # of a curve beside `run`; what a run has spent is counted from its start
    "rounds",  # finished
    "bytes_up",  # sent by clients
    "bytes_down",  # sent to clients
    "num_aggregated",  # uploads
    "test_accuracy",  # in 0…1
    "test_loss",  # on the same samples
    "train_loss",  # the clients' loss in training, mean of the last ten rounds with an upload
    "alpha",  # the improvement factor of optimal client sampling, mean of the rounds
    "trained",  # trainings of clients, by all tasks
    "seconds",  # wall time of the rounds
    "simulated",  # seconds of the rounds on the simulated network
    "train_set_loss",  # on all training samples
)
WINDOW = 10  # rounds over which the clients' loss is averaged
DIGITS = 7  # significant digits kept


def evaluations(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the curves of runs from their rounds (`train.report.frame.round_frame`)."""
    rounds = rounds.reindex(columns=dict.fromkeys((*rounds, "improvement_alpha", "train_set_loss")))
    by_task = rounds.filter(regex="/num_clients$")
    trained = by_task.sum(axis=1).where(by_task.notna().any(axis=1), rounds.num_clients.fillna(0))
    costs = rounds[["bytes_up", "bytes_down", "num_aggregated", "seconds"]].assign(trained=trained.astype(int))
    spent = costs.groupby(rounds.run, sort=False).cumsum()
    losses = rounds.train_loss[rounds.num_aggregated > 0].dropna().groupby(rounds.run)
    loss = losses.rolling(WINDOW, min_periods=1).mean().droplevel(0).reindex(rounds.index)
    alpha = rounds.improvement_alpha.groupby(rounds.run).expanding().mean().droplevel(0)
    curves = rounds.assign(
        **spent, train_loss=loss.groupby(rounds.run).ffill(), alpha=alpha, simulated=rounds.simulated_total
    )
    return curves.loc[curves.test_accuracy.notna(), ["run", *COLUMNS]]


def write_curves(path: Path, curves: pd.DataFrame) -> None:
    """Write curves as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, curves.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\r\n").encode())


def read_curves(path: Path, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Return the curves in a file; empty without one."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["run", *columns])


def by_scheme(curves: pd.DataFrame) -> pd.DataFrame:
    """Add the `scheme` and the `seed` of runs named ``scheme-seed``, and `bytes_total`, both ways.

    Other names, of runs with other overrides, are left out.
    """
    parts = curves.run.str.extract(r"^(?P<scheme>.*)-(?P<seed>\d+)$").dropna()
    curves = curves.loc[parts.index].assign(scheme=parts.scheme, seed=parts.seed.astype(int))
    return curves.assign(bytes_total=curves.bytes_up + curves.bytes_down)


def ends(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the last evaluation of each run."""
    return curves.drop_duplicates("run", keep="last")


def costs_to(curves: pd.DataFrame, reached: pd.Series, cost: str, seeds: Iterable[int]) -> pd.Series:
    """Return the cost of each seed of a scheme at its first evaluation where `reached` holds; NaN without one."""
    return curves[reached].groupby("seed")[cost].first().reindex(list(seeds))


def spread(values: Iterable[float], form: str = ".1f", missing: str = "never") -> str:
    """Return ``mean ± sd`` of a few seeds, and the number of NaN among them, which are called `missing`."""
    values = list(values)
    finite = [value for value in values if not isnan(value)]
    if not finite:
        return missing
    without = f" ({len(values) - len(finite)} {missing})" if len(finite) < len(values) else ""
    return f"{mean_and_spread(finite, form)}{without}"


def mean_and_error(gaps: pd.Series) -> str:
    """Return ``mean ± standard error`` of the seeds' differences, in points."""
    return f"{gaps.mean():+.1f} " + (f"± {gaps.sem():.1f}" if len(gaps) > 1 else "(one seed)")
