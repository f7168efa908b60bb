"""Runs as pandas frames, from which reports, tables and pictures take their numbers.

Shares are in 0…1 here, as in a configuration and in `metrics.jsonl`; only text for people has percents.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sharding.errors import UserError
from sharding.validation import is_number
from train.config.schema import flatten
from train.config.yaml_text import read_yaml
from train.rundir.directory import check_regular
from train.rundir.file_names import CONFIG_FILE, METRICS_FILE
from train.rundir.status import has_diverged, has_ended, is_lost
from train.utils.jsonl import rounds_among, split

log = logging.getLogger(__name__)

REQUIRED = (  # numbers of each round
    *("bytes_down", "bytes_up", "bytes_dense", "bytes_total"),
    "num_clients",
)
OPTIONAL = (  # columns in any case
    *("train_loss", "test_accuracy", "test_loss", "best_accuracy", "simulated_seconds"),
    *("num_aggregated", "num_failed", "seconds"),  # secrets of a run with privacy
)
NOT_NUMBERS = ("run", "stopped", "failures", "failed_by_kind")
DIVERGED = "the last rounds had no usable update"


@dataclass(frozen=True)
class Runs:
    """Runs, finished or not.

    Attributes:
        settings: a row for each run, by its directory: the keys of its configuration, flat, as ``local.optimizer.lr``.
        rounds: a row for each round: its `run`, its metrics, and the costs so far: `rounds`, `bytes_total`, and
            `simulated_total` in seconds.
        results: a row for each run: totals, means and last values of its metrics; its `seed`, whether it `is_finished`,
            the `reason_ended`, and a note on its first `damaged` line, or None.
    """

    settings: pd.DataFrame
    rounds: pd.DataFrame
    results: pd.DataFrame

    @property
    def begun(self) -> "Runs":
        """The runs with a finished round."""
        return self.subset(self.results.index[self.results.num_rounds > 0])

    def subset(self, directories: Iterable[str]) -> "Runs":
        """Return these runs only, in this order."""
        index = list(directories)
        return Runs(self.settings.loc[index], self.rounds[self.rounds.run.isin(index)], self.results.loc[index])


def read_runs(directories: Iterable[Path]) -> tuple[Runs, list[str]]:
    """Read runs, each up to its first damaged line, of which it warns; return them, and the errors of the others."""
    settings: dict[str, dict[str, Any]] = {}
    status: dict[str, dict[str, Any]] = {}
    lines: dict[str, list[dict[str, Any]]] = {}
    errors = []
    for directory in directories:
        try:
            flat, rounds, damaged = _read_run(directory)
        except UserError as error:
            errors.append(str(error))
            continue
        run, diverged = str(directory), has_diverged([*map(is_lost, rounds)], flat["rounds"])
        stopped = rounds[-1].get("stopped") if rounds else None
        settings[run], lines[run] = flat, rounds
        status[run] = {
            "seed": flat["seed"],
            "is_finished": has_ended(rounds, flat["rounds"]),
            "reason_ended": DIVERGED if diverged else stopped or "it was interrupted, or is still running",
            "damaged": damaged,
        }
    index = pd.Index(list(settings), dtype=object, name="run")
    frame = round_frame(lines)
    status_frame = pd.DataFrame(
        list(status.values()), index, ["seed", "is_finished", "reason_ended", "damaged"], dtype=object
    )
    totals = _results(frame).reindex(index).fillna({"num_rounds": 0}).astype({"num_rounds": int, "num_failed": "Int64"})
    results = totals.join(status_frame.astype({"is_finished": bool}))
    return Runs(pd.DataFrame(list(settings.values()), index, dtype=object), frame, results), errors


def find_runs(folders: Iterable[Path]) -> tuple[Runs, list[str]]:
    """Read all runs with a finished round in these folders and their subfolders; log and return the errors.

    Raise a UserError if a folder does not exist, or there is no readable run.
    """
    folders = list(folders)
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"there is no folder {missing[0]}; name folders that hold runs")
    directories = {path.parent for folder in folders for path in folder.rglob(METRICS_FILE) if path.stat().st_size}
    all_runs, errors = read_runs(sorted(directories))
    runs = all_runs.begun
    if runs.results.empty:
        names = f"no run with a finished round in {', '.join(map(str, folders))}; name folders that hold runs"
        raise UserError("; ".join(errors) or names)
    warn_left_out(errors)
    return runs, errors


def warn_left_out(errors: Iterable[str]) -> None:
    """Warn about runs that could not be read."""
    for error in errors:
        log.warning("%s; it is left out", error)


def _read_run(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]], str | None]:
    """Return a run's configuration, flat, the metrics of its rounds, and a note on its first damaged line.

    Raise a UserError if the directory holds no run, or its first line is damaged.
    """
    metrics, unreadable = directory / METRICS_FILE, f"{directory} holds no run that can be read"
    check_regular(directory)
    try:
        config = read_yaml(directory / CONFIG_FILE)
        texts = split(metrics.read_bytes())
        kinds = {"name": str, "strategy": str, "rounds": int, "seed": int}
        if wrong := [key for key, kind in kinds.items() if not isinstance(config[key], kind)]:
            raise TypeError(f"{CONFIG_FILE} has no valid {wrong[0]}")
        flat = flatten(config)
    except (UserError, OSError, KeyError, TypeError) as error:
        raise UserError(f"{unreadable}: {' '.join(str(error).split())}") from error
    lines = list(takewhile(_is_round, rounds_among(texts)))
    if len(lines) == len(texts):
        return flat, lines, None
    damaged = f"{metrics}, line {len(lines) + 1}, is not the metrics of round {len(lines) + 1}"
    if not lines:
        raise UserError(f"{unreadable}: {damaged}")
    log.warning("%s; only the rounds before it are shown", damaged)
    return flat, lines, damaged


def _is_round(line: Mapping[str, Any]) -> bool:
    """Return whether all required metrics are numbers, and accuracies are between 0 and 1."""
    known = ("num_aggregated", "num_failed", "simulated_seconds")
    spent = {key: value for key, value in line.items() if key.startswith("seconds") or key in known}
    accuracies = [value for key, value in line.items() if key.endswith("test_accuracy")]
    return (
        all(is_number(value) and 0 <= value < 1e18 for value in [*spent.values(), *map(line.get, REQUIRED)])
        and line["bytes_dense"] > 0
        and all(is_number(value) and 0 <= value <= 1 for value in accuracies)
        and isinstance(line.get("failures", {}), dict)
    )


def round_frame(lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> pd.DataFrame:
    """Return `Runs.rounds` of the metrics of each run's rounds. What is no number in JSON is NaN."""
    frame = pd.DataFrame([{"run": run, **line} for run, rounds in lines.items() for line in rounds])
    columns = dict.fromkeys((*frame, "run", "round", *REQUIRED, *OPTIONAL, "stopped", "failures"))
    frame = frame.reindex(columns=list(columns)).apply(_to_numbers).copy()  # a copy has few blocks, so it can grow
    simulated = frame.groupby("run", sort=False).simulated_seconds.cumsum()
    return frame.assign(rounds=frame["round"] + 1, simulated_total=simulated)


def _to_numbers(column: pd.Series) -> pd.Series:
    return column if column.name in NOT_NUMBERS else pd.to_numeric(column, errors="coerce")


def _results(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each run; bytes are those of a client in a round."""
    by_run = rounds.groupby("run", sort=False)
    sums, last = by_run.sum(numeric_only=True), by_run.last()  # the last that is a number
    evaluated = rounds[rounds.test_accuracy.notna()].drop_duplicates("run", keep="last").set_index("run")
    down, up = (sums[f"bytes_{way}"] / sums.num_clients.clip(lower=1) for way in ("down", "up"))  # 0 without clients
    return pd.DataFrame(
        {
            "num_rounds": by_run.size(),
            "test_accuracy": last.test_accuracy,
            "best_accuracy": last.best_accuracy,
            "test_loss": evaluated.test_loss.reindex(last.index),
            "megabytes": last.bytes_total / 1e6,
            "bytes_down_per_client_round": down,
            "bytes_up_per_client_round": up,
            "share_of_dense": (down + up) / (2 * by_run.bytes_dense.first()),
            **{key: by_run[key].sum(min_count=1) for key in ("num_failed", "seconds", "simulated_seconds")},
        }
    )


def mean_curve(rounds: pd.DataFrame, y: str, x: str = "rounds") -> pd.DataFrame:
    """Return the mean of several runs' curves at the rounds that all of them have.

    Args:
        rounds: a frame with columns `run`, `rounds`, `x` and `y`; values that are not finite are no points, and runs
            without a point are left out.
        y: a metric.
        x: a cost so far.

    Returns:
        `x`, `mean`, `deviation` over runs (0 of a single run), and the number of `runs`, by `rounds`.
    """
    columns = ["x", "mean", "deviation", "runs"]
    if y not in rounds:
        return pd.DataFrame(columns=columns, dtype=float)
    points = pd.DataFrame({"run": rounds.run, "rounds": rounds.rounds, "x": rounds[x], "y": rounds[y]})
    points = points[np.isfinite(points.y)]
    by_round = points.groupby("rounds")
    curve = by_round.agg(x=("x", "mean"), mean=("y", "mean"), deviation=("y", "std"), runs=("run", "nunique"))
    return curve[curve.runs == points.run.nunique()].fillna({"deviation": 0.0})


def cost_to(rounds: pd.DataFrame, target: float, cost: str = "bytes_total") -> pd.Series:
    """Return what each run had spent when an evaluation first reached a test accuracy; NaN if none did."""
    reached = rounds[rounds.test_accuracy >= target - 1e-11]
    return reached.groupby("run")[cost].first().reindex(rounds.run.unique())
