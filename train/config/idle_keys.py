"""Keys without effect: when a run reads each key, and the refusal of keys that were set but are not read.

A key that is not in the table is always read, or its own part refuses it, as a model refuses options of another model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from sharding.aggregation.server_optimizer import SERVER_OPTIMIZERS
from sharding.client_sampling import SAMPLERS, StatisticalSampler
from sharding.errors import UserError
from sharding.strategies import STRATEGIES, get_strategy
from train.config.schema import Asked, Config
from train.config.sections import ClientsConfig
from train.config.yaml_text import in_yaml
from train.data.vision import SOURCES

Read = Callable[[Config], bool]
DRAWS_OWN_WAY = ("top_n", "top_n_scaled", "prism", "prism_scaled", "prism_wallenius", "prism_wallenius_clip")
WITHOUT_ALPHA = ("iid", "natural", "two_sizes", "shards")
WITHOUT_FINE_ALPHA = (*WITHOUT_ALPHA, "dirichlet", "power_law", "power_law_classes")


@dataclass(frozen=True)
class Reading:
    """The condition under which a key is read.

    Attributes:
        key: dotted.
        by: the keys on which the condition depends.
        read: returns whether a configuration reads the key.
        remedy: for the user if it does not.
    """

    key: str
    by: tuple[str, ...]
    read: Read
    remedy: str


def set_in_vain(asked: Asked) -> dict[str, str]:
    """Return the keys that nothing reads, and why.

    A key of the file that an override made idle is allowed, since several runs share the file.
    """
    config, tasks = asked.config, asked.config.task_configs()
    found: dict[str, str] = {}
    for row in READINGS:
        parts = [*tasks.values()] if tasks and not row.key.startswith(OF_THE_WHOLE) else [config]
        if not any(map(row.read, parts)) and _is_set(asked, row.key, row.by):
            found |= _objection(row.key, parts[0], row)
        own = [name for name, its in config.tasks.items() if row.key in _flat(its)]
        for name in own if _is_set(asked, "tasks", row.by) else ():
            if not row.read(tasks[name]):
                found |= _objection(row.key, tasks[name], row, f"tasks.{name}.")
    return found


def _is_set(asked: Asked, key: str, by: Sequence[str]) -> bool:
    return key in asked.line or (key in asked.file and asked.line.isdisjoint(by))


def refuse_idle(asked: Sequence[Asked]) -> None:
    """Refuse a key that none of the configurations reads.

    Raises:
        UserError: naming each key, its value, the reason and the remedy.
    """
    vain = [set_in_vain(its) for its in asked]
    if keys := [key for key in vain[0] if all(key in its for its in vain)]:
        raise UserError("; ".join(vain[0][key] for key in keys))


def _objection(key: str, config: Config, row: Reading, prefix: str = "") -> dict[str, str]:
    """Return why a key has no effect, unless it has its default, which is harmless."""
    value = _value(config, key)
    if value == _default(config, key):
        return {}
    where = " and ".join(f"{its}={_shown(config, its)}" for its in row.by)
    return {prefix + key: f"{prefix}{key}={_shown(config, key)} does nothing where {where}; {row.remedy}"}


def _parent(config: Config, key: str) -> tuple[Any, str]:
    section, _, last = key.rpartition(".")
    return (getattr(config, section) if section else config), last


def _value(config: Config, key: str) -> object:
    return getattr(*_parent(config, key))


def _default(config: Config, key: str) -> object:
    section, last = _parent(config, key)
    return type(section).model_fields[last].get_default(call_default_factory=True, validated_data=section.__dict__)


def _shown(config: Config, key: str) -> str:
    section, last = _parent(config, key)
    return in_yaml(section.model_dump(mode="json", include={last})[last])


def _flat(values: Mapping[str, Any]) -> set[str]:
    return {*values} | {f"{key}.{inner}" for key, its in values.items() if isinstance(its, Mapping) for inner in its}


def _one_of(key: str, names: Sequence[str]) -> str:
    return f"use it with {key}={' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}"


def _of_samplers(option: str) -> Reading:
    names = [name for name in SAMPLERS if _takes(name, option)]
    return Reading(
        f"clients.{option}",
        ("clients.sampler",),
        lambda its: _takes(its.clients.sampler, option),
        _one_of("clients.sampler", names),
    )


def _takes(sampler: str, option: str) -> bool:
    if option == "pilot_losses":  # read by `train.pilots`, which measures what these samplers learn
        return issubclass(SAMPLERS[sampler], StatisticalSampler)
    return option in ClientsConfig.shared_options(sampler)


def _of_trackers() -> Iterator[Reading]:
    for key in ("project", "entity", "group", "name", "tags", "artifacts"):
        yield Reading(
            f"tracking.{key}",
            ("tracking.wandb",),
            lambda its: its.tracking.wandb != "disabled" or bool(its.tracking.use),
            "set tracking.wandb=online or offline",
        )


def _of_network() -> Iterator[Reading]:
    for key in ("compute", "communicate", "profiles"):
        yield Reading(
            f"network.{key}",
            ("network.bandwidth",),
            lambda its: its.network.bandwidth is not None,
            "set network.bandwidth too",
        )
    for key in ("compute", "communicate"):
        yield Reading(
            f"network.{key}",
            ("network.profiles",),
            lambda its: its.network.profiles is None,
            "remove one of them",
        )


READINGS = (
    Reading(
        "design",
        ("strategy",),
        lambda its: its.strategy not in (*DRAWS_OWN_WAY, "full", "dense"),
        "use it with a strategy that draws with given probabilities, e.g. collective",
    ),
    Reading(
        "keep_ratio",
        ("strategy",),
        lambda its: get_strategy(its.strategy).allocate is not None and get_strategy(its.strategy).keep_ratio is None,
        "dense and full send all terms",
    ),
    Reading(
        "clip", ("local.optimizer",), lambda its: not its.local.scales or its.clip == inf, "use local.optimizer=sgd"
    ),
    Reading(
        "clip",
        ("strategy",),
        lambda its: get_strategy(its.strategy).clips or its.clip == inf,
        _one_of("strategy", [name for name, its in STRATEGIES.items() if its.clips]),
    ),
    Reading(
        "server_momentum",
        ("server_optimizer",),
        lambda its: SERVER_OPTIMIZERS[its.server_optimizer] is not None,
        _one_of("server_optimizer", [name for name, make in SERVER_OPTIMIZERS.items() if make]),
    ),
    Reading(
        "patience",
        ("rounds", "evaluate_every"),
        lambda its: its.patience is None or sum(map(its.evaluates, range(its.rounds))) > its.patience,
        "the run has too few evaluations: lower evaluate_every",
    ),
    Reading("data.root", ("data.name",), lambda its: its.data.name != "digits", "this dataset comes with scikit-learn"),
    Reading(
        "data.download",
        ("data.name",),
        lambda its: its.data.name not in ("digits", "shakespeare"),
        _one_of("data.name", [*SOURCES]),
    ),
    Reading(
        "data.alpha",
        ("data.partition",),
        lambda its: its.data.partition not in WITHOUT_ALPHA,
        _one_of("data.partition", ["dirichlet", "pachinko", "power_law", "power_law_classes"]),
    ),
    *(
        Reading(
            f"data.{key}",
            ("data.partition",),
            lambda its: its.data.partition not in WITHOUT_FINE_ALPHA,
            _one_of("data.partition", ["pachinko"]),
        )
        for key in ("fine_alpha", "concentration")
    ),
    *map(_of_samplers, ("replacement", "budget", "beta_over_alpha", "signal", "pilot_losses")),
    *_of_network(),
    Reading("local.epochs", ("local.steps",), lambda its: its.local.steps is None, "remove one of them"),
    Reading(
        "local.frobenius_decay_of",
        ("local.frobenius_decay",),
        lambda its: its.local.frobenius_decay > 0,
        "remove one of them",
    ),
    *_of_trackers(),
)
# No task has its own value of these.
OF_THE_WHOLE = ("clients.", "network.", "tracking.", "patience")
