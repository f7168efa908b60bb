"""Keys without effect: when each key is read, and an error for keys that are set but not read.

A key that is not in the table is always read, or checked by its own part: a model refuses options of another model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any

from sharding.aggregation.server_optimizer import SERVER_OPTIMIZERS
from sharding.client_sampling import SAMPLERS, StatisticalSampler
from sharding.errors import UserError
from sharding.strategies import STRATEGIES, get_strategy
from train.config.registries import SCHEDULES
from train.config.schema import OF_THE_WHOLE, Config, LoadedConfig
from train.config.sections import ClientsConfig
from train.config.yaml_text import in_yaml
from train.data import DATASETS
from train.data.partition import PARTITIONS


@dataclass(frozen=True)
class Reading:
    """The condition under which some keys are read.

    Attributes:
        keys: dotted, separated by blanks.
        by: the keys on which the condition depends.
        read: returns whether a key is read, from its own value and those of `by`.
        remedy: for the user if it is not; by default the names of `by` with which it is read.
    """

    keys: str
    by: str
    read: Callable[..., bool]
    remedy: str = ""


def _draws(_: object, strategy: str) -> bool:
    own = ("top_n", "top_n_scaled", "prism", "prism_scaled", "prism_wallenius", "prism_wallenius_clip", "full", "dense")
    return strategy not in own


def _takes(option: str, _: object, sampler: str) -> bool:
    if option == "pilot_losses":  # read by `train.pilots`, which measures what these samplers learn
        return issubclass(SAMPLERS[sampler], StatisticalSampler)
    return option in ClientsConfig.shared_options(sampler)


def _factorizes(_: object, strategy: str) -> bool:
    return get_strategy(strategy).allocate is not None


def _draws_any(_: object, keep_ratio: float | Mapping[float, float]) -> bool:
    return any(r < 1 for r in (keep_ratio if isinstance(keep_ratio, Mapping) else [keep_ratio]))


def _starts_lower(_: object, keep_ratio: float | Mapping[float, float], count: int) -> bool:
    return keep_ratio.get(1.0, 0) * count < 1 if isinstance(keep_ratio, Mapping) else keep_ratio < 1


WITHOUT_ALPHA = ("iid", "natural", "two_sizes", "shards")
WITHOUT_FINE_ALPHA = (*WITHOUT_ALPHA, "dirichlet", "power_law", "power_law_classes")
NAMES: Mapping[str, Mapping[str, object]] = {
    **{"strategy": STRATEGIES, "server_optimizer": SERVER_OPTIMIZERS, "clients.sampler": SAMPLERS},
    **{"data.name": DATASETS, "data.partition": PARTITIONS},
}
READINGS = (
    Reading("design", "strategy", _draws),
    Reading("design", "keep_ratio", _draws_any, "every client holds all terms; keep fewer, or remove it"),
    Reading(
        "keep_ratio init", "strategy", lambda _, name: _factorizes(_, name) and get_strategy(name).keep_ratio is None
    ),
    Reading("init", "keep_ratio clients.count", _starts_lower, "the strongest client holds all terms; remove it"),
    Reading("alignment", "strategy", _factorizes),
    Reading("clip", "strategy", lambda clip, name: clip == inf or get_strategy(name).clips),
    Reading("local.frobenius_decay", "strategy", lambda decay, name: decay == 0 or _factorizes(decay, name)),
    Reading("local.frobenius_decay_of tracking.layers_every", "strategy", _factorizes),
    Reading("local.frobenius_decay_of", "local.frobenius_decay", lambda _, decay: decay > 0, "remove one of them"),
    Reading("local.epochs", "local.steps", lambda _, steps: steps is None, "remove one of them"),
    Reading("server_momentum", "server_optimizer", lambda _, name: SERVER_OPTIMIZERS[name] is not None),
    Reading("aggregation.norm_bound aggregation.max_share", "clients.per_round", lambda _, n: n > 1, "invite more"),
    Reading("aggregation.trim", "clients.per_round", lambda _, n: n > 2, "of two values none is left out; invite more"),
    Reading(
        "local.schedule",
        "rounds",
        lambda name, rounds: rounds > 1 or SCHEDULES[name](1.0, 0, rounds) != 1,
        "the first round has local.lr; remove one of them",
    ),
    Reading(
        "tracking.layers_every",
        "rounds",
        lambda every, rounds: every is None or every <= rounds,
        "the first and the last round are recorded anyway",
    ),
    Reading(
        "patience",
        "rounds evaluate_every",
        lambda patience, rounds, every: patience is None or ceil(rounds / every) > patience,
        "the run has too few evaluations: lower evaluate_every",
    ),
    Reading("data.root", "data.name", lambda _, name: name not in ("digits", "synthetic")),
    Reading("data.download", "data.name", lambda _, name: name not in ("digits", "synthetic", "shakespeare")),
    Reading("data.alpha", "data.partition", lambda _, name: name not in WITHOUT_ALPHA),
    Reading("data.fine_alpha data.concentration", "data.partition", lambda _, name: name not in WITHOUT_FINE_ALPHA),
    *(
        Reading(f"clients.{option}", "clients.sampler", partial(_takes, option))
        for option in ("replacement", "budget", "beta_over_alpha", "signal", "pilot_losses")
    ),
    Reading("clients.budget", "clients.signal", lambda _, signal: signal != "full", "remove one of them"),
    Reading(
        "network.compute network.communicate",
        "network.bandwidth",
        lambda _, bandwidth: bandwidth is not None,
        "set network.bandwidth too",
    ),
    Reading(
        "tracking.project tracking.entity tracking.group tracking.name tracking.tags tracking.artifacts",
        "tracking.wandb tracking.use",
        lambda _, wandb, use: wandb != "disabled" or bool(use),
        "set tracking.wandb=online or offline",
    ),
)


def refuse_idle(loaded: Sequence[LoadedConfig]) -> None:
    """Refuse a key that none of the configurations reads.

    Raises:
        UserError: naming each key, its value, the reason and the remedy.
    """
    vain = [set_in_vain(config) for config in loaded]
    if keys := [key for key in vain[0] if all(key in found for found in vain)]:
        raise UserError("; ".join(vain[0][key] for key in keys))


def set_in_vain(loaded: LoadedConfig) -> dict[str, str]:
    """Return the keys that nothing reads, and why.

    A key of the file that an override made idle is allowed, since several runs share the file.
    """
    config, tasks = loaded.config, loaded.config.task_configs()
    found: dict[str, str] = {}
    for row, key in [(its, key) for its in READINGS for key in its.keys.split()]:
        whole = re.split(r"[. ]", row.by)[0] in OF_THE_WHOLE
        parts = [*tasks.values()] if tasks and not whole else [config]
        if _is_set(loaded, key, row.by) and not any(_is_read(row, key, part) for part in parts):
            found[key] = _objection(row, key, parts[0])
        own = [name for name, its in config.tasks.items() if key in _flat(its)]
        for name in own if _is_set(loaded, "tasks", row.by) else ():
            if not _is_read(row, key, tasks[name]):
                found[f"tasks.{name}.{key}"] = f"tasks.{name}.{_objection(row, key, tasks[name])}"
    return found


def _is_set(loaded: LoadedConfig, key: str, by: str) -> bool:
    return key in loaded.line or (key in loaded.file and loaded.line.isdisjoint(by.split()))


def _is_read(row: Reading, key: str, config: Config) -> bool:
    """Return whether a key is read, or has its default, which is harmless."""
    section, last = _parent(config, key)
    default = type(section).model_fields[last].get_default(call_default_factory=True, validated_data=section.__dict__)
    value, *others = (getattr(*_parent(config, each)) for each in (key, *row.by.split()))
    return bool(value == default or row.read(value, *others))


def _objection(row: Reading, key: str, config: Config) -> str:
    where = " and ".join(_set(config, its) for its in row.by.split())
    value = getattr(*_parent(config, key))
    *first, last = [name for name in NAMES.get(row.by, ()) if row.read(value, name)] or [""]
    names = f"use it with {row.by}={' or '.join(filter(None, (', '.join(first), last)))}"
    return f"{_set(config, key)} does nothing where {where}; {row.remedy or names}"


def _set(config: Config, key: str) -> str:
    section, last = _parent(config, key)
    return f"{key}={in_yaml(section.model_dump(mode='json', include={last})[last])}"


def _parent(config: Config, key: str) -> tuple[Any, str]:
    section, _, last = key.rpartition(".")
    return (getattr(config, section) if section else config), last


def _flat(values: Mapping[str, Any]) -> set[str]:
    return {*values} | {f"{key}.{inner}" for key, its in values.items() if isinstance(its, Mapping) for inner in its}
