"""Curves of a study's runs: one CSV row per evaluation, from which tables and pictures are made again."""

import csv
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan, nan
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from train.report.text import mean_and_spread, write_csv

LAST = 10  # rounds over which the clients' loss is averaged
DIGITS = 7  # significant digits kept
COUNTS, CLOCKS = ("bytes_up", "bytes_down", "heard", "trained"), ("seconds", "simulated")  # of an evaluation

Lines = Sequence[Mapping[str, Any]]  # of one run's metrics.jsonl
Row = Any  # a named tuple of numbers: an `Evaluation`, or another record that a study's `of_run` keeps of a run


class Evaluation(NamedTuple):
    """An evaluated model's scores, and the cost since the start of the run. A number that does not exist is NaN.

    Attributes:
        rounds: finished rounds.
        bytes_up: bytes sent by clients.
        bytes_down: bytes sent to clients.
        heard: uploads.
        test_accuracy: in 0…1.
        test_loss: on the same samples.
        train_loss: the clients' loss in training, mean of the last ten rounds with an upload.
        alpha: the improvement factor of optimal client sampling, mean of the rounds.
        trained: trainings of clients, by all tasks.
        seconds: wall time of the rounds.
        simulated: seconds of the rounds on the simulated network.
        train_set_loss: on all training samples.
    """

    rounds: int
    bytes_up: int
    bytes_down: int
    heard: int
    test_accuracy: float
    test_loss: float
    train_loss: float = nan
    alpha: float = nan
    trained: int = 0
    seconds: float = nan
    simulated: float = nan
    train_set_loss: float = nan

    @classmethod
    def of_run(cls, lines: Lines) -> list[Self]:
        """Return every evaluation of a run, rounded to the kept digits; null in JSON becomes NaN."""
        found, sums = [], dict.fromkeys((*COUNTS, *CLOCKS), 0.0)
        losses, alphas = deque[float](maxlen=LAST), list[float]()
        for line in lines:
            spent = {**line, "trained": _trained(line), "simulated": line.get("simulated_seconds", nan)}
            sums = {key: so_far + spent.get(key, nan) for key, so_far in sums.items()}
            if line["heard"] and "train_loss" in line:
                losses.append(_number(line["train_loss"]))
            if "improvement_alpha" in line:
                alphas.append(line["improvement_alpha"])
            if "test_accuracy" in line:
                counts = {key: int(sums[key]) for key in COUNTS}
                scores = {key: _number(line.get(key)) for key in ("test_accuracy", "test_loss", "train_set_loss")}
                scores |= {"train_loss": _mean(losses), "alpha": _mean(alphas)} | {key: sums[key] for key in CLOCKS}
                rounded: dict[str, Any] = {key: float(f"{score:.{DIGITS}g}") for key, score in scores.items()}
                found.append(cls(line["round"] + 1, **counts, **rounded))
        return found


Curve = Sequence[Evaluation]
Amount = Callable[[Evaluation], float]  # a cost
one_round: Amount = attrgetter("rounds")
simulated_seconds: Amount = attrgetter("simulated")


def _trained(line: Mapping[str, Any]) -> int:
    tasks = [value for key, value in line.items() if key.endswith("/clients")]
    return sum(tasks) if tasks else line.get("clients", 0)


def _number(value: float | None) -> float:
    return nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else nan


def write_curves(path: Path, curves: Mapping[str, Sequence[Row]], kind: type[Row] = Evaluation) -> None:
    """Write every row of every run as CSV, with the run's name first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ((name, *map(_cell, row)) for name, its in curves.items() for row in its)
    write_csv(path, ("run", *kind._fields), rows)


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else "" if isnan(value) else f"{value:.{DIGITS}g}"


def read_curves(path: Path, kind: type[Row] = Evaluation) -> dict[str, list[Row]]:
    """Return what `write_curves` wrote; empty without a file."""
    found: dict[str, list[Row]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                its = found.setdefault(row.pop("run"), [])
                its.append(kind(**{key: kind.__annotations__[key](cell or "nan") for key, cell in row.items()}))
    return found


def by_seed(curves: Mapping[str, Sequence[Row]]) -> dict[str, dict[int, Sequence[Row]]]:
    """Return the curves named ``scheme-seed`` by scheme and seed.

    Other names, of runs with other overrides, are left out.
    """
    found: dict[str, dict[int, Sequence[Row]]] = {}
    for name, its in curves.items():
        scheme, _, seed = name.rpartition("-")
        if seed.isdigit():
            found.setdefault(scheme, {})[int(seed)] = its
    return found


def spread(values: Sequence[float], form: str = ".1f", missing: str = "never") -> str:
    """Return ``mean ± sd`` of a few seeds, and the number of NaN among them, which are called `missing`."""
    finite = [value for value in values if not isnan(value)]
    if not finite:
        return missing
    without = f" ({len(values) - len(finite)} {missing})" if len(finite) < len(values) else ""
    return f"{mean_and_spread(finite, form)}{without}"


def gigabytes(at: Evaluation) -> float:
    """Return the gigabytes that were sent to and by clients."""
    return (at.bytes_up + at.bytes_down) / 1e9


def megabytes_up(at: Evaluation) -> float:
    """Return the megabytes that clients sent."""
    return at.bytes_up / 1e6


def spent_to(its: Curve, amount: Amount, accuracy: float = inf, loss: float = -inf) -> float:
    """Return the cost at the first evaluation at a test accuracy or at a loss on all training samples; else NaN."""
    return next((amount(at) for at in its if at.test_accuracy >= accuracy or at.train_set_loss <= loss), nan)
