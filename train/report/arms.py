"""Group runs into arms, the seeds of one configuration; name what differs, and what an accuracy cost each arm."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import floor
from statistics import fmean
from typing import Any

from train.config.naming import HOUSEKEEPING, last_words
from train.config.schema import flatten, is_named
from train.config.yaml_text import in_yaml
from train.report.history import History
from train.report.plots import Curve, Style, mean_band, style_of, styles_of
from train.report.text import NOTHING, mean_and_spread
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

    def curves(self, y: str, x: str = "rounds") -> list[Curve]:
        """Return the seeds' curves that have a point."""
        return [curve for run in self.runs if (curve := run.curve(y, x))]

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
    """Return a run's configuration, flat, without what makes no other experiment."""
    unnamed = HOUSEKEEPING | {"recipe"}  # covered by the keys that it sets
    return {key: value for key, value in flatten(run.config).items() if not is_named(key, unnamed)}


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configurations differ."""
    keys = dict.fromkeys(key for its in settings for key in its)
    return [key for key in keys if any(its.get(key) != settings[0].get(key) for its in settings)]


def _varied(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """Return the values of the first keys, by their last words."""
    first = zip(last_words(keys), keys, strict=True)
    return {word: value_of(settings, key) for word, key in islice(first, MOST_KEYS)}


def _identity(run: History) -> str:
    return json.dumps(sorted(settings_of(run).items()), default=str)


def _standing(run: History) -> tuple[bool, int, float]:
    return run.is_finished, len(run.lines), (run.directory / METRICS_FILE).stat().st_mtime


def choose_targets(arms: Sequence[Arm]) -> list[float]:
    """Return the configurations' target accuracies in %; without any, up to three that were reached.

    These are multiples of 5 %: one that the worst arm reached, one that only the best reached, and one
    between.
    """
    if aimed := targets_of(arms):
        return aimed
    bands = [mean_band(curves).means for arm in arms if (curves := arm.curves("test_accuracy"))]
    best = [max(means) for means in bands if means]  # seeds may have no evaluated round in common
    if not best:
        return []
    ends = min(best), max(best)
    chosen = {5.0 * floor(value / 5) for value in (ends[0], fmean(ends), ends[1])}
    return sorted(chosen - {0.0})


def targets_of(arms: Sequence[Arm]) -> list[float]:
    """Return the target accuracies of the runs' configurations, in %."""
    aimed = {arm.settings.get("target_accuracy") for arm in arms}
    return sorted(100 * target for target in aimed if target is not None)


def spent_until(run: History, target: float, unit: str) -> float | None:
    """Return the cost in `unit` (of `AMOUNTS`) until an evaluation first reached a target in %, or None."""
    return next((point.x for point in run.curve("test_accuracy", unit) if point.y >= target - 1e-9), None)


def prices(arm: Arm, target: float, unit: str = "bytes") -> list[float]:
    """Return the cost of each seed to reach a target in %, without the seeds that never did."""
    return [spent for run in arm.runs if (spent := spent_until(run, target, unit)) is not None]


def price(arm: Arm, target: float) -> str:
    """Return the MB that the seeds of an arm moved to reach a target in %, and how many never did."""
    reached = prices(arm, target)
    if not reached:
        return "never"
    never = len(arm.runs) - len(reached)
    return mean_and_spread(reached, ",.1f") + (f" ({never} of {len(arm.runs)} seeds never)" if never else "")
