"""The record of a run, read from its directory and checked once."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from sharding.errors import UserError
from sharding.validation import is_number
from train.config.yaml_text import read_yaml
from train.report.plots import Curve, Point
from train.rundir.directory import check_regular
from train.rundir.files import CONFIG_FILE, METRICS_FILE
from train.rundir.provenance import Provenance
from train.runtime.jsonl import has_diverged, has_ended, megabytes, rounds_among, split

log = logging.getLogger(__name__)

NEEDED = ("bytes_down", "bytes_up", "bytes_dense", "clients", "failed", "seconds")  # numbers that each round must have


@dataclass(frozen=True)
class History:
    """One run, finished or not.

    Attributes:
        lines: of its `metrics.jsonl`, up to the first damaged one.
        config: from its `config.yaml`.
        directory: of the run.
        spoiled: the first damaged line, or None.
    """

    lines: list[dict[str, Any]]
    config: Mapping[str, Any]
    directory: Path
    spoiled: str | None = None

    @classmethod
    def read(cls, directory: Path) -> "History":
        """Read a run's directory, up to the first damaged line, of which it warns.

        Raises:
            UserError: it holds no run, or its first line is damaged.
        """
        metrics = directory / METRICS_FILE
        check_regular(directory)
        try:
            config = read_yaml(directory / CONFIG_FILE)
            texts = split(metrics.read_bytes())
            kinds = {"name": str, "strategy": str, "rounds": int, "seed": int, "tasks": dict}
            if wrong := [key for key, kind in kinds.items() if not isinstance(config[key], kind)]:
                raise TypeError(f"{CONFIG_FILE} has no valid {wrong[0]}")
        except (UserError, OSError, KeyError, TypeError) as error:
            raise UserError(f"{directory} holds no run that can be read: {' '.join(str(error).split())}") from error
        lines = list(takewhile(_is_round, rounds_among(texts)))
        if len(lines) == len(texts):
            return cls(lines, config, directory)
        spoiled = f"{metrics}, line {len(lines) + 1}, is not the metrics of round {len(lines) + 1}"
        if not lines:
            raise UserError(f"{directory} holds no run that can be read: {spoiled}")
        log.warning("%s; only the rounds before it are shown", spoiled)
        return cls(lines, config, directory, spoiled)

    @property
    def name(self) -> str:
        """The experiment's name."""
        return str(self.config["name"])

    @property
    def accuracies(self) -> list[float]:
        """The test accuracies of all evaluations, in %."""
        return [100 * line["test_accuracy"] for line in self.lines if "test_accuracy" in line]

    @property
    def why_ended(self) -> str:
        """Why the run has stopped, or that it may still be running."""
        if has_diverged(self.lines, self.config["rounds"]):
            return "it diverged: the last rounds had no usable update"
        return str(self.lines[-1].get("stopped", "it was interrupted, or is still running"))

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, early or not."""
        return has_ended(self.lines, self.config["rounds"])

    def total(self, key: str) -> float:
        """Return the sum of a metric over all rounds."""
        return sum(line.get(key, 0) for line in self.lines)

    @property
    def megabytes(self) -> float:
        """The MB that all clients moved in all rounds, down and up."""
        return sum(map(megabytes, self.lines))

    def mean_bytes(self, direction: str) -> float:
        """Bytes ``down`` or ``up``, per client and round."""
        return float(self.total(f"bytes_{direction}") / max(self.total("clients"), 1))  # 0 without clients

    @property
    def share_of_dense(self) -> float:
        """A client's bytes per round, down and up, relative to dense FedAvg."""
        return (self.mean_bytes("down") + self.mean_bytes("up")) / (2 * float(self.lines[0]["bytes_dense"]))

    def curve(self, y: str, x: str = "rounds", smooth: float = 0.0) -> Curve:
        """Return y over x for the rounds that have y; shares are in %.

        Args:
            y: a key of the metrics.
            x: the cost so far: ``rounds``, ``bytes`` (MB) or ``simulated`` seconds.
            smooth: the weight w of the past in m_t = w m_(t-1) + (1 - w) y_t; dividing by its total weight keeps
                the first values from being drawn towards zero.
        """
        factor, points, average = 100 if y.endswith("accuracy") else 1, list[Point](), 0.0
        for line, spent in zip(self.lines, accumulate(map(AMOUNTS[x], self.lines)), strict=True):
            if is_number(line.get(y)):
                average = smooth * average + (1 - smooth) * factor * line[y]
                points.append(Point(line["round"], spent, average / (1 - smooth ** (len(points) + 1))))
        return points


def _is_round(line: Mapping[str, Any]) -> bool:
    """Return whether all required metrics are numbers, and accuracies are between 0 and 1."""
    spent = {key: value for key, value in line.items() if key.startswith("seconds") or key == "simulated_seconds"}
    accuracies = [value for key, value in line.items() if key.endswith("test_accuracy")]
    return (
        all(is_number(value) and 0 <= value < 1e18 for value in [*spent.values(), *map(line.get, NEEDED)])
        and line["bytes_dense"] > 0
        and all(is_number(value) and 0 <= value <= 1 for value in accuracies)
        and isinstance(line.get("failures", {}), dict)
    )


AMOUNTS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "rounds": lambda line: 1,
    "bytes": megabytes,
    "simulated": lambda line: line.get("simulated_seconds", 0.0),
}


def find_runs(folders: Iterable[Path]) -> tuple[list[History], list[str]]:
    """Read all runs with a finished round in these folders and their subfolders.

    Returns:
        The runs, and the errors, which are also logged as warnings.

    Raises:
        UserError: a folder does not exist, or there is no readable run.
    """
    folders = list(folders)
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"there is no folder {missing[0]}; name folders that hold runs")
    found = {path.parent for folder in folders for path in folder.rglob(METRICS_FILE) if path.stat().st_size}
    read, unread = read_all(sorted(found))
    runs = [run for run in read if run.lines]
    if not runs and unread:
        raise UserError("; ".join(unread))
    if not runs:
        raise UserError(f"no run with a finished round in {', '.join(map(str, folders))}; name folders that hold runs")
    warn_of(unread)
    return runs, unread


def warn_of(unread: Iterable[str]) -> None:
    """Warn about runs that could not be read."""
    for why in unread:
        log.warning("%s; it is left out", why)


def data_remarks(runs: Iterable[History]) -> list[str]:
    """Return how the data of these runs differ from the official ones, according to their directories."""
    remarks: dict[str, None] = {}
    for run in runs:
        with suppress(UserError):  # the page reports a damaged file
            held = Provenance.read(run.directory)
            remarks |= dict.fromkeys(remark for each in (held.data.values() if held else ()) for remark in each)
    return list(remarks)


def read_all(directories: Iterable[Path]) -> tuple[list[History], list[str]]:
    """Return the readable runs in these directories, and the errors of the others."""
    runs, unread = [], []
    for directory in directories:
        try:
            runs.append(History.read(directory))
        except UserError as error:
            unread.append(str(error))
    return runs, unread
