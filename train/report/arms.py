"""Group runs into arms, the seeds of one configuration, and name the settings in which arms differ."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from train.config.naming import HOUSEKEEPING
from train.config.schema import check_config, flatten, is_named
from train.config.yaml_text import in_yaml
from train.report.history import History
from train.report.plots import Curve, Style, style_of, styles_of
from train.report.text import NOTHING
from train.rundir.files import METRICS_FILE

MOST_KEYS = 3  # number of keys in a label


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed.

    Attributes:
        strategy: their name in a table; numbered where the varied keys are the same for several.
        varied: the first keys in which the arms differ, shortened, and this one's values.
        settings: the configuration, flat, without keys that do not change the experiment.
        runs: one for each seed.
        style: of its line.
    """

    strategy: str
    varied: Mapping[str, str]
    settings: Mapping[str, Any]
    runs: Sequence[History]
    style: Style

    @property
    def label(self) -> str:
        """The strategy and the varied keys, in one line."""
        return ", ".join([self.strategy, *(f"{key}={value}" for key, value in self.varied.items())])

    def curves(self, y: str, x: str = "rounds", smooth: float = 0.0) -> list[Curve]:
        """Return the seeds' curves that have a point."""
        return [curve for run in self.runs if (curve := run.curve(y, x, smooth))]

    @property
    def finals(self) -> list[float]:
        """The last test accuracy of each seed, in %."""
        return [run.accuracies[-1] for run in self.runs if run.accuracies]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The metrics of all rounds of all seeds."""
        return [line for run in self.runs for line in run.lines]


def without_repeats(runs: Sequence[History]) -> tuple[list[History], list[tuple[History, History]]]:
    """Keep one run of each configuration and seed: a finished one, else the longest, else the newest.

    Returns:
        The runs to keep, and for each other run the one that replaces it.
    """
    alike: dict[str, list[History]] = {}
    for run in runs:
        alike.setdefault(f"{run.config.get('seed')} {_identity(run)}", []).append(run)
    kept = {key: max(its, key=_standing) for key, its in alike.items()}
    left_out = [(run, kept[key]) for key, its in alike.items() for run in its if run is not kept[key]]
    return list(kept.values()), left_out


def group(runs: Sequence[History]) -> list[Arm]:
    """Group the seeds of each configuration, in the order of their first run.

    Each strategy has its color; if several arms have the same strategy, each arm has a color.
    """
    gathered: dict[str, list[History]] = {}
    for run in runs:
        gathered.setdefault(_identity(run), []).append(run)
    settings = [settings_of(seeds[0]) for seeds in gathered.values()]
    keys = differing_keys(settings)
    varied = [_varied(its, [key for key in keys if key != "strategy"]) for its in settings]
    labels = [(str(its["strategy"]), tuple(of.values())) for its, of in zip(settings, varied, strict=True)]
    strategies = [strategy for strategy, _ in labels]
    repeats = len({*strategies}) < len(strategies)
    styles = [*styles_of(map(str, range(len(labels)))).values()] if repeats else list(map(style_of, strategies))
    times, same, arms = Counter(labels), Counter[tuple[str, tuple[str, ...]]](), list[Arm]()
    for place, (label, seeds) in enumerate(zip(labels, gathered.values(), strict=True)):
        strategy, same[label] = label[0], same[label] + 1
        numbered = f"{strategy} ({same[label]})" if times[label] > 1 else strategy
        arms.append(Arm(numbered, varied[place], settings[place], seeds, styles[place]))
    return arms


def value_of(settings: Mapping[str, Any], key: str) -> str:
    """Return the value of a key in a configuration, in YAML."""
    return in_yaml(settings[key]) if key in settings else NOTHING


def settings_of(run: History) -> dict[str, Any]:
    """Return a run's configuration, flat, with defaults for keys that it lacks."""
    flat = flatten(_defaults()) | flatten(run.config)
    unnamed = HOUSEKEEPING | {"recipe"}  # covered by the keys that it sets
    return {key: value for key, value in flat.items() if not is_named(key, unnamed)}


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configurations differ."""
    keys = dict.fromkeys(key for its in settings for key in its)
    return [key for key in keys if any(its.get(key) != settings[0].get(key) for its in settings)]


def _varied(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """Return the values of the first keys, by the key's last word, or the full key if two end alike."""
    lasts = [key.rpartition(".")[2] for key in keys]
    words = [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]
    return {word: value_of(settings, key) for word, key in zip(words[:MOST_KEYS], keys, strict=False)}


def _identity(run: History) -> str:
    return json.dumps(settings_of(run), sort_keys=True, default=str)


def _standing(run: History) -> tuple[bool, int, float]:
    return run.is_finished, len(run.lines), (run.directory / METRICS_FILE).stat().st_mtime


@cache
def _defaults() -> dict[str, Any]:
    """Return the configuration of the published algorithm, to which labels refer."""
    needed = {"name": "run", "rounds": 1, "model": {"name": "mlp"}, "data": {"name": "digits"}}
    clients = {"count": 1, "per_round": 1}
    return check_config(needed | {"recipe": "published", "clients": clients}).model_dump(mode="json")
