"""Group the seeds of each configuration; name what differs between groups, and what an accuracy cost each of them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import floor, isnan
from pathlib import Path
from typing import Any

import pandas as pd

from train.config.naming import NON_EXPERIMENT_KEYS
from train.config.schema import is_named
from train.config.yaml_text import in_yaml
from train.report.frame import Runs, cost_to, mean_curve
from train.report.plots import Style, style_of, styles_of
from train.report.text import NOTHING, mean_and_spread
from train.rundir.file_names import METRICS_FILE

MAX_KEYS = 3  # in a label


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed.

    Attributes:
        strategy: their name in a table; numbered where the varied keys are the same for several.
        varied: the first keys in which the groups differ, shortened, and this one's values.
        settings: the configuration, flat, without keys that do not change the experiment.
        results: a row for each seed, as in `Runs`.
        rounds: the rounds of all seeds, as in `Runs`.
        style: the style of its line.
    """

    strategy: str
    varied: Mapping[str, str]
    settings: Mapping[str, Any]
    results: pd.DataFrame
    rounds: pd.DataFrame
    style: Style

    @property
    def label(self) -> str:
        """The strategy and the varied keys, in one line."""
        return ", ".join([self.strategy, *(f"{key}={value}" for key, value in self.varied.items())])

    @property
    def percents(self) -> pd.Series:
        """The last test accuracy of each seed that has one, in %."""
        return 100 * self.results.test_accuracy.dropna()


def group_runs(runs: Runs) -> list[RunGroup]:
    """Group the seeds of each configuration, in the order of their first run.

    Each strategy has its color; if several groups have the same strategy, each group has a color.
    """
    seeds = list(runs.settings.groupby(_experiments(runs), sort=False).groups.values())
    settings = [_experiment_settings(runs.settings.loc[directories[0]]) for directories in seeds]
    keys = [key for key in differing_keys(settings) if key != "strategy"]
    words = dict(islice(zip(_short_names(keys), keys, strict=True), MAX_KEYS))
    varied = [{word: value_of(each, key) for word, key in words.items()} for each in settings]
    names = [(str(each["strategy"]), *values.values()) for each, values in zip(settings, varied, strict=True)]
    strategies, seen, groups = [name[0] for name in names], Counter[tuple[str, ...]](), list[RunGroup]()
    repeats = len({*strategies}) < len(strategies)
    styles = [*styles_of(map(str, range(len(names)))).values()] if repeats else [*map(style_of, strategies)]
    for index, name in enumerate(names):
        seen[name] += 1
        strategy = f"{name[0]} ({seen[name]})" if names.count(name) > 1 else name[0]
        chosen = runs.subset(seeds[index])
        groups.append(RunGroup(strategy, varied[index], settings[index], chosen.results, chosen.rounds, styles[index]))
    return groups


def without_repeats(runs: Runs) -> tuple[Runs, list[tuple[str, str]]]:
    """Keep one run of each configuration and seed: a finished one, else the longest, else the newest.

    Return the runs to keep, and for each other directory the one that replaces it.
    """
    modified = [(Path(run) / METRICS_FILE).stat().st_mtime for run in runs.results.index]
    ranked = runs.results.assign(same=_experiments(runs) + runs.settings.seed.astype(str), modified=modified)
    ranked = ranked.sort_values(["is_finished", "num_rounds", "modified"], ascending=False, kind="stable")
    kept = ranked.drop_duplicates("same").reset_index().set_index("same").run
    replaced_by = ranked.same.map(kept).reindex(runs.results.index)
    left_out = [(run, better) for run, better in replaced_by.items() if run != better]
    return runs.subset(replaced_by.unique()), left_out


def _experiments(runs: Runs) -> pd.Series:
    """Return a text for each run that is the same for all seeds of a configuration."""
    rows = {run: _experiment_settings(row) for run, row in runs.settings.iterrows()}
    texts = [json.dumps(sorted(row.items()), default=str) for row in rows.values()]
    return pd.Series(texts, runs.settings.index, dtype=object)


def _experiment_settings(settings: pd.Series) -> dict[str, Any]:
    """Return the keys of a run's configuration that change its results. NaN stands for a key of other runs only."""
    unnamed = NON_EXPERIMENT_KEYS | {"recipe"}  # covered by the keys that it sets
    keys = {str(key): value for key, value in settings.items() if not is_named(str(key), unnamed)}
    return {key: value for key, value in keys.items() if not (isinstance(value, float) and isnan(value))}


def _short_names(keys: Sequence[str]) -> list[str]:
    """Return each key's last word, or all of it where another key has that word too."""
    words = [key.rpartition(".")[2] for key in keys]
    return [word if words.count(word) == 1 else key for key, word in zip(keys, words, strict=True)]


def value_of(settings: Mapping[str, Any], key: str) -> str:
    """Return the value of a key in a configuration, in YAML."""
    return in_yaml(settings[key]) if key in settings else NOTHING


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configurations differ."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def choose_targets(groups: Sequence[RunGroup]) -> list[float]:
    """Return the configurations' target accuracies; without any, up to three that were reached.

    These are multiples of 0.05: one that the worst group reached, one that only the best reached, and one between.
    """
    if configured := targets_of(groups):
        return configured
    curves = [mean_curve(group.rounds, "test_accuracy") for group in groups]
    best = [curve["mean"].max() for curve in curves if len(curve)]  # seeds may have no evaluated round in common
    if not best:
        return []
    ends = min(best), max(best)
    return sorted({floor(20 * share) / 20 for share in (ends[0], sum(ends) / 2, ends[1])} - {0.0})


def targets_of(groups: Sequence[RunGroup]) -> list[float]:
    """Return the target accuracies of the runs' configurations."""
    return sorted({target for group in groups if (target := group.settings.get("target_accuracy")) is not None})


def format_cost(group: RunGroup, target: float) -> str:
    """Return the MB that the seeds of a group moved to reach a test accuracy, and how many never did."""
    costs = cost_to(group.rounds, target)
    reached = costs.dropna() / 1e6
    if reached.empty:
        return "never"
    never = len(costs) - len(reached)
    return mean_and_spread(reached, ",.1f") + (f" ({never} of {len(costs)} seeds never)" if never else "")
