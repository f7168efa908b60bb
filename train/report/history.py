"""What a run has left in its directory, and which runs are seeds of the same thing."""

import csv
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from sharding.errors import UserError
from train.config import check_older, flatten, is_named
from train.directory import CONFIG_FILE, METRICS_FILE
from train.files import write_whole
from train.lines import has_ended, rounds_among, split
from train.naming import HOUSEKEEPING
from train.plots import Curve, Point, Style, style_of
from train.yaml_text import in_yaml

log = logging.getLogger(__name__)

MOST_KEYS = 3  # so many are told in a label, which stands in tables and legends
# What does not make a run another experiment: also where its data are.
UNTOLD = HOUSEKEEPING | {"data.root", "data.download"}


@dataclass(frozen=True)
class History:
    """One run, finished or not.

    Attributes:
        strategy: of the run.
        lines: of its `metrics.jsonl`, up to one that is spoiled.
        config: as written beside them.
        directory: where it is.
        spoiled: the first line that is no round, in words; None where all are.
    """

    strategy: str
    lines: list[dict[str, Any]]
    config: Mapping[str, Any]
    directory: Path
    spoiled: str | None = None

    @classmethod
    def read(cls, directory: Path) -> "History":
        """Read a run's directory: its rounds up to one that is spoiled, of which a warning tells.

        Raises:
            UserError: it holds no run, or something else under such names.
        """
        metrics = directory / METRICS_FILE
        try:
            config = yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))
            strategy, texts = config["strategy"], split(metrics.read_bytes())
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(f"{directory} holds no run that can be read: {' '.join(str(error).split())}") from error
        lines = rounds_among(texts)
        if len(lines) == len(texts):
            return cls(strategy, lines, config, directory)
        spoiled = f"{metrics}, line {len(lines) + 1}, is not the metrics of round {len(lines) + 1}"
        if not lines:
            raise UserError(f"{directory} holds no run that can be read: {spoiled}")
        log.warning("%s; the rounds before it are shown", spoiled)
        return cls(strategy, lines, config, directory, spoiled)

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The lines of the rounds that were evaluated."""
        return [line for line in self.lines if "test_accuracy" in line]

    @property
    def why_ended(self) -> str | None:
        """Why the run ended before its last round, None where it did not end so."""
        return self.lines[-1].get("stopped") if self.lines else None

    @property
    def is_finished(self) -> bool:
        """Whether it has come to its end, early or not."""
        return has_ended(self.lines, self.config["rounds"])

    def mean_bytes(self, direction: str) -> float:
        """Bytes ``down`` or ``up``, per client and round."""
        clients = sum(line["clients"] for line in self.lines)
        return float(sum(line[f"bytes_{direction}"] for line in self.lines) / max(clients, 1))  # 0 of nobody

    @property
    def share_of_dense(self) -> float:
        """What a client moved in a round, down and up, of what dense FedAvg would have."""
        return (self.mean_bytes("down") + self.mean_bytes("up")) / (2 * float(self.lines[0]["bytes_dense"]))

    def curve(self, y: str, x: str = "rounds") -> Curve:
        """Return the rounds that have y, against ``rounds``, ``bytes`` (MB) or ``simulated`` seconds; shares in %."""
        factor = 100 if y.endswith("accuracy") else 1
        places = accumulate(map(AMOUNTS[x], self.lines))
        return [
            Point(line["round"], place, factor * line[y])
            for place, line in zip(places, self.lines, strict=True)
            if isinstance(line.get(y), int | float) and isfinite(line[y])
        ]


def megabytes(line: Mapping[str, float]) -> float:
    """Return what all clients moved in a round, down and up, in MB, from its line in `metrics.jsonl`."""
    return (line["bytes_down"] + line["bytes_up"]) / 1e6


AMOUNTS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "rounds": lambda line: 1,
    "bytes": megabytes,
    "simulated": lambda line: line.get("simulated_seconds", 0.0),
}


def evaluations(
    lines: Sequence[Mapping[str, float]], amount: Callable[[Mapping[str, float]], float]
) -> list[tuple[float, float]]:
    """Return (what has been spent so far, test accuracy in 0…1) at every evaluation; a round spends `amount` of it."""
    spent = accumulate(map(amount, lines))
    return [
        (so_far, line["test_accuracy"]) for so_far, line in zip(spent, lines, strict=True) if "test_accuracy" in line
    ]


def find_runs(folders: Iterable[Path]) -> tuple[list[History], list[str]]:
    """Read all runs in these folders and below that have finished a round.

    Returns:
        The runs, and what could not be read, of which a warning tells too.

    Raises:
        UserError: there is none, or none that can be read, or no such folder.
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
    for why in unread:
        log.warning("%s; it is left out", why)
    return runs, unread


def read_all(directories: Iterable[Path]) -> tuple[list[History], list[str]]:
    """Return the runs in these directories that can be read, and why others cannot."""
    runs, unread = [], []
    for directory in directories:
        try:
            runs.append(History.read(directory))
        except UserError as error:
            unread.append(str(error))
    return runs, unread


def without_repeats(runs: Sequence[History]) -> tuple[list[History], list[tuple[History, History]]]:
    """Keep one run of each configuration and seed: a finished one, else the longest, else the newest.

    Returns:
        The runs to keep, and of each other the run that stands for it.
    """
    alike: dict[str, list[History]] = {}
    for run in runs:
        alike.setdefault(f"{run.config.get('seed')} {_identity(run)}", []).append(run)
    kept = {key: max(its, key=_standing) for key, its in alike.items()}
    left_out = [(run, kept[key]) for key, its in alike.items() for run in its if run is not kept[key]]
    return list(kept.values()), left_out


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone.

    Attributes:
        label: the strategy, and what else tells it from the other arms.
        settings: its configuration, flat, without what does not make it another experiment.
        style: how it is drawn.
    """

    label: str
    strategy: str
    settings: Mapping[str, Any]
    runs: Sequence[History]
    style: Style

    def curves(self, y: str, x: str = "rounds") -> list[Curve]:
        """Return the seeds' curves, without those that have no point."""
        return [curve for run in self.runs if (curve := run.curve(y, x))]

    @property
    def finals(self) -> list[float]:
        """The last test accuracy of every seed that has one, in %."""
        return [100 * run.evaluated[-1]["test_accuracy"] for run in self.runs if run.evaluated]


def group(runs: Sequence[History]) -> list[Arm]:
    """Put the seeds of one configuration together, in the order of their first run."""
    gathered: dict[str, list[History]] = {}
    for run in runs:
        gathered.setdefault(_identity(run), []).append(run)
    members = list(gathered.values())
    settings = [settings_of(seeds[0]) for seeds in members]
    seen: dict[str, int] = {}
    arms = []
    for its, seeds, label in zip(settings, members, _labels(settings), strict=True):
        strategy = str(its["strategy"])
        number = seen[strategy] = seen.get(strategy, -1) + 1
        arms.append(Arm(label, strategy, its, seeds, style_of(strategy).variant(number)))
    return arms


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each configuration, numbered where what it tells is the same for several."""
    named: dict[str, list[Mapping[str, Any]]] = {}
    for its in settings:
        named.setdefault(str(its["name"]), []).append(its)
    differing = {name: differing_keys(alike) for name, alike in named.items()}
    labels = [_label(its, differing) for its in settings]
    times, seen = Counter(labels), Counter[str]()
    for place, label in enumerate(labels):
        if times[label] > 1:
            seen[label] += 1
            labels[place] = f"{label} ({seen[label]})"
    return labels


def _label(its: Mapping[str, Any], differing: Mapping[str, Sequence[str]]) -> str:
    """Return the strategy, the name where there are several, and the first keys in which those of that name differ."""
    name = str(its["name"])
    keys = [key for key in differing[name] if key != "strategy"][:MOST_KEYS]
    told = [f"{_short(key, differing[name])}={value_of(its, key)}" for key in keys]
    return ", ".join([str(its["strategy"]), *([name] if len(differing) > 1 else []), *told])


def value_of(settings: Mapping[str, Any], key: str) -> str:
    """Return what a configuration has for a key, as YAML writes it."""
    return in_yaml(settings[key]) if key in settings else "–"


def settings_of(run: History) -> dict[str, Any]:
    """Return a run's configuration, flat, with defaults for keys that did not exist then."""
    flat = flatten(_defaults()) | flatten(run.config)
    return {key: value for key, value in flat.items() if not is_named(key, UNTOLD)}


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configurations differ."""
    keys = dict.fromkeys(key for its in settings for key in its)
    return [key for key in keys if any(its.get(key) != settings[0].get(key) for its in settings)]


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a table and return its path."""
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
    return path


def _identity(run: History) -> str:
    return json.dumps(settings_of(run), sort_keys=True, default=str)


def _standing(run: History) -> tuple[bool, int, float]:
    return run.is_finished, len(run.lines), (run.directory / METRICS_FILE).stat().st_mtime


def _short(key: str, among: Sequence[str]) -> str:
    """Return a dotted key's last word, or all of it where that is another key's as well."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in among) == 1 else key


@cache
def _defaults() -> dict[str, Any]:
    """Return what a run did whose configuration says no more than it must."""
    needed = {"name": "run", "rounds": 1, "model": {"name": "mlp"}, "data": {"name": "digits"}}
    clients = {"count": 1, "per_round": 1}
    return check_older(needed | {"clients": clients}).model_dump(mode="json")
