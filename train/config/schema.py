"""The configuration of a run: YAML files and ``dotted.key=value`` overrides, checked before anything is computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from torch import nn

from models import find_model
from models.options import check_options
from sharding.aggregation.server_optimizer import LARGEST_LR, SERVER_OPTIMIZERS
from sharding.client_sampling import SAMPLERS
from sharding.designs import DESIGNS
from sharding.errors import UserError, nearest, pick, shown
from sharding.strategies import get_strategy
from sharding.transport.compression import COMPRESSIONS
from train.config.registries import LOSSES, OPTIMIZERS, SCHEDULES, import_parts
from train.config.sections import (
    AggregationConfig,
    ClientsConfig,
    DataConfig,
    KeepRatio,
    LocalConfig,
    ModelConfig,
    NetworkConfig,
    Section,
    TrackingConfig,
    section_of,
)
from train.config.values import FileName, UserPath
from train.config.yaml_text import parse_yaml, read_yaml
from train.data import DATASETS
from train.data.partition import PARTITIONS

PATHS = ("output", "data.root")  # taken literally from the command line: 2024 can be a folder
OF_THE_WHOLE = (
    *("name", "recipe", "rounds", "output", "clients", "network", "tasks", "evaluate_every", "alignment", "tracking"),
    *("evaluate_training", "target_accuracy", "target_loss", "patience"),
    *("checkpoint_every", "threads", "plugins"),
)
# The keys that a recipe sets unless the configuration does. `tuned` is the keys' own defaults.
PUBLISHED = {"strategy": "collective", "init": "as_built", "server_optimizer": "plain", "result": "last"}
PUBLISHED_LOCAL = {"lr": 0.1}


def _server_lr(its: Mapping[str, Any]) -> float:
    return {"nesterov": 0.4, "adam": 0.01}.get(str(its.get("server_optimizer")), 1.0)


def _looks_ahead(its: Mapping[str, Any]) -> bool:
    return its.get("server_optimizer") == "nesterov"


class Config(Section):
    """One training run. Defaults of `init`, `result` and the optimizers are not the paper's: docs/results/beyond.md."""

    name: FileName
    """Name of the run."""
    recipe: Literal["tuned", "published"] = "tuned"
    """The defaults of `strategy`, `init`, `local.lr`, `server_optimizer` and `result`.

    `published` is the paper's algorithm: `collective`, `as_built`, 0.1, `plain`, `last`. `tuned` is ours: `top_n`,
    `low_rank`, 0.02, `nesterov`, `average`. Both have the `bounded` decay.
    """
    seed: int = 0
    """Seed of every random number."""
    data_seed: int | None = None
    """Seed of everything before round 0: the partition, keep ratios, the network, the first model and pilots.

    Default: `seed`.
    """
    rounds: int = Field(ge=1, le=10**9)
    """Number of rounds, unless the run ends earlier."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Test accuracy at which the run ends."""
    target_loss: float | None = Field(None, gt=0)
    """Training loss at which the run ends. With both targets, the run ends once each has been reached."""
    patience: int | None = Field(None, ge=1)
    """Number of evaluations without a better accuracy after which the run ends."""
    plugins: tuple[str, ...] = ()
    """Modules to import first, which register your own parts. Overrides and `--import` add to those of the file."""
    output: UserPath | None = None
    """Directory of the run. Default: below `runs`, named after the name, the strategy, the overrides and the seed."""
    strategy: str = "top_n"
    """The terms that clients receive, and their weights: a name in the table of strategies."""
    design: str = "cps"
    """The way to draw terms with given probabilities: a name in the table of designs."""
    clip: float = Field(10.0, ge=1, allow_inf_nan=True)
    """τ ≥ 1 of strategies that clip the effective learning rate. `.inf` turns clipping off."""
    keep_ratio: KeepRatio = 0.2
    """r, the share of each layer's terms that a client trains.

    A mapping gives the share of clients that have each r.
    """
    compression: str = "float32"
    """Number format of shards in both directions: `float32`, `bfloat16` or `int8`."""
    model: ModelConfig
    data: DataConfig
    clients: ClientsConfig
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    local: LocalConfig = Field(default_factory=LocalConfig)
    init: Literal["low_rank", "as_built"] = "low_rank"
    """First model: `as_built`, or `low_rank`, which keeps as many terms of each sharded layer as the strongest client
    can afford.
    """
    server_optimizer: str = "nesterov"
    """Server's step towards the aggregate: `plain`, `momentum`, `nesterov` or `adam`."""
    server_momentum: float = Field(default_factory=lambda its: 0.8 if _looks_ahead(its) else 0.9, gt=0, lt=1)
    """β of the server's optimizer: 0.8 for `nesterov`, else 0.9."""
    server_lr: float = Field(default_factory=_server_lr, gt=0, lt=LARGEST_LR)
    """η_g, the server's learning rate: 0.4 for `nesterov`, 0.01 for `adam`, else 1."""
    result: Literal["average", "last"] = "average"
    """Model to evaluate and save: the `average` of the rounds' models, which weights late rounds most, or the `last`
    one.
    """
    aggregation: AggregationConfig = Field(default_factory=AggregationConfig)
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Models to train at once, by name. Each has the keys in which it differs from this configuration."""
    engine: str = "auto"
    """How clients are trained: `sequential`, in `processes`, one per core or GPU, or by `ray` on a cluster.

    All give the same bits. `auto` chooses one of the first two.
    """
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, …"""
    threads: int = Field(1, ge=1)
    """Torch threads of a training process. Another number rounds sums differently."""
    checkpoint_every: int = Field(5, ge=1)
    """Rounds between checkpoints. There is also one after the last round, and when the run is stopped."""
    evaluate_every: int = Field(1, ge=1)
    """Rounds between evaluations. The last round is always evaluated."""
    evaluate_training: bool = False
    """Whether to evaluate on the clients' samples too."""
    alignment: bool = False
    """Whether to compare the update of each evaluated round with FedAvg's, which about doubles its cost."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return self.output or Path("runs") / f"{self.name}-{self.strategy}-{self.seed}"

    @property
    def seed_of_data(self) -> int:
        """The seed of everything before round 0."""
        return self.seed if self.data_seed is None else self.data_seed

    def evaluates(self, t: int) -> bool:
        """Return whether round t is evaluated."""
        return t % self.evaluate_every == self.evaluate_every - 1 or t == self.rounds - 1

    def task_configs(self) -> dict[str, "Config"]:
        """Return the configuration of each task: this one with the task's own keys.

        The server's learning rate and momentum belong to its optimizer, so a task with another one has its defaults.
        """
        shared = self.model_dump(exclude={"tasks"}, exclude_unset=True)
        shared["clients"] = {"count": self.clients.count, "per_round": self.clients.per_round}
        others = {key: value for key, value in shared.items() if key not in ("server_lr", "server_momentum")}
        mine = self.server_optimizer
        alike = {name: own.get("server_optimizer", mine) == mine for name, own in self.tasks.items()}
        return {name: check_config(_merged(shared if alike[name] else others, own)) for name, own in self.tasks.items()}

    def _check_tasks(self) -> None:
        if self.tasks and self.alignment:
            raise UserError("alignment=true does nothing for tasks; leave one of them out")
        for name, own in self.tasks.items():
            if not name.isidentifier() or hasattr(nn.ModuleDict(), name):
                raise UserError(
                    f"the task name {shown(name)} must be a word that modules have no attribute of, e.g. cifar10"
                )
            if whole := [key for key in OF_THE_WHOLE if key in own]:
                raise UserError(f"tasks.{name}.{whole[0]} cannot differ between tasks; set {whole[0]} for all")
        self.task_configs()

    @model_validator(mode="before")
    @classmethod
    def _import_first(cls, values: Any) -> Any:
        import_parts(plugins_of(values))
        return values

    @model_validator(mode="before")
    @classmethod
    def _follow_the_recipe(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("recipe") != "published":
            return values
        local = values.get("local", {})
        return PUBLISHED | values | {"local": PUBLISHED_LOCAL | local if isinstance(local, dict) else local}

    @model_validator(mode="after")
    def _names_and_numbers_exist(self) -> "Config":
        get_strategy(self.strategy)
        pick(DESIGNS, self.design, "design")
        pick(COMPRESSIONS, self.compression, "compression")
        find_model(self.model.name, self.model.options)
        data = self.data
        check_options(data.name, pick(DATASETS, data.name, "dataset"), data.options, "data.options")
        divide = pick(PARTITIONS, data.partition, "partition")
        check_options(data.partition, divide, data.partition_options, "data.partition_options")
        pick(LOSSES, self.local.loss, "loss")
        make = pick(OPTIMIZERS, self.local.optimizer, "optimizer")
        check_options(self.local.optimizer, make, self.local.optimizer_options, "local.optimizer_options")
        pick(SCHEDULES, self.local.schedule, "schedule")
        pick(SERVER_OPTIMIZERS, self.server_optimizer, "server optimizer")
        clients = self.clients
        sampler = pick(SAMPLERS, clients.sampler, "sampler")
        check_options(clients.sampler, sampler, clients.options, "clients.options")
        if shared := clients.options.keys() & ClientsConfig.model_fields.keys():
            raise UserError(f"clients.options.{min(shared)} has its own key; set clients.{min(shared)}")
        sampler(clients.count, clients.per_round, self.seed, **clients.sampler_options)
        if sampler.chooses_tasks != bool(self.tasks):
            raise UserError("clients.sampler=mmfl and tasks={name: {…}} need each other; set both or neither")
        self._check_tasks()
        if clients.beta_over_alpha == "pilots" and not (sampler.timed and clients.pilot_losses):
            raise UserError(
                "clients.beta_over_alpha=pilots needs clients.sampler=wireless and clients.pilot_losses=[…]"
            )
        if self.target_loss is not None and (self.tasks or not self.evaluate_training):
            raise UserError("target_loss=… needs evaluate_training=true, which measures that loss, and one model")
        if sampler.timed and self.network.bandwidth is None:
            raise UserError(f"clients.sampler={clients.sampler} needs network.bandwidth=…, which all clients share")
        if isinstance(self.keep_ratio, dict) and abs(sum(self.keep_ratio.values()) - 1) > 1e-6:
            raise UserError(f"the shares of keep_ratio {self.keep_ratio} sum to {sum(self.keep_ratio.values())}, not 1")
        return self


def plugins_of(values: Any) -> list[str]:
    """Return the modules that an unchecked configuration names; none for a value that pydantic refuses."""
    named = values.get("plugins") if isinstance(values, dict) else None
    modules = [named] if isinstance(named, str) else named
    return [str(module) for module in modules] if isinstance(modules, list | tuple) else []


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration, and the origin of its keys.

    Attributes:
        config: checked.
        file: dotted keys that its file sets.
        line: dotted keys that overrides set.
    """

    config: Config
    file: frozenset[str]
    line: frozenset[str]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``dotted.key=value`` overrides (values in YAML), and check the result.

    Raises:
        UserError: no such file, invalid YAML, an unknown key, or an invalid value.
    """
    return read_config(path, overrides).config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """As `load_config`, but also return the origin of each key, for `train.config.idle_keys.refuse_idle`."""
    values = read_yaml(Path(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__}, but a config is a mapping from keys to values")
    # The config.yaml of a run has every key, and so some that nothing reads.
    file = frozenset() if Config.model_fields.keys() - {"output"} <= values.keys() else frozenset(flatten(values))
    given, own, plugins = flatten(values), dict[str, Any](), plugins_of(values)
    for override in overrides:
        _override(own, override)
    if _is_another_model(values.get("model"), own.get("model")):
        values["model"] = {}  # its options are not those of the other
    for override in overrides:
        _override(values, override)
    if isinstance(values.get("plugins"), list):  # those of the file are needed as well
        values["plugins"] = [*dict.fromkeys([*plugins, *plugins_of(values)])]
    config = check_config(values)
    if own.get("recipe", given.get("recipe")) != given.get("recipe") and {*PUBLISHED, "local.lr"} <= given.keys():
        raise UserError(f"recipe={own['recipe']} changes nothing: {path} sets all of its keys; remove them there")
    return LoadedConfig(config, file, frozenset(flatten(own)))


def check_config(values: dict[str, Any]) -> Config:
    """Return the configuration of these values; a `UserError` lists all that are invalid."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        # A default that depends on an invalid key has no value; that is not a second error.
        found = [its for its in error.errors() if its["type"] != "default_factory_not_called"]
        raise UserError("; ".join(map(_explain, found))) from error


def _merged(shared: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `shared` with the values of `own`. Sections keep their other keys, except options of another model."""
    merged = dict(shared)
    for key, value in own.items():
        old: Any = shared.get(key)
        section = key in SECTIONS and isinstance(old, dict) and isinstance(value, dict)
        merged[key] = old | value if section and not (key == "model" and _is_another_model(old, value)) else value
    return merged


def _is_another_model(old: Any, new: Any) -> bool:
    """Return whether a section `model` names another model than one before."""
    return isinstance(old, dict) and isinstance(new, dict) and new.get("name", old.get("name")) != old.get("name")


def _override(values: dict[str, Any], override: str) -> None:
    """Apply one ``dotted.key=value``."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"cannot read the override {override!r}; write dotted.key=value, e.g. local.lr=0.05")
    *parents, last = key.split(".")
    for parent in parents:
        child = values.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"cannot set {key!r}: {parent!r} is {child!r}, not a section")
        values = child
    try:
        value = parse_yaml(text)
    except UserError as error:
        raise UserError(f"cannot read the value {shown(text)} of {shown(key)} as YAML: {error}") from error
    values[last] = text.strip() if _means_itself(key, text, value) else value


def _means_itself(key: str, text: str, value: object) -> bool:
    """Return whether an override is taken literally: paths, and plain words, which YAML would cut at a #."""
    if isinstance(value, str):
        return text[:1] not in "\"'|>&!"
    return key in PATHS and value is not None


def _explain(error: ErrorDetails) -> str:
    """Return the message for one of pydantic's errors."""
    if isinstance(cause := error.get("ctx", {}).get("error"), UserError):
        return str(cause)
    tags = () if error["type"] == "extra_forbidden" else ("number", "shares", "range", "[key]")
    key = ".".join(str(part)[:80] for part in error["loc"] if part not in tags)
    if error["type"] == "extra_forbidden":
        where = "docs/reference/configuration.md lists all keys, `python -m train config CONFIG` prints a run's"
        return f"unknown config key {key!r}{_meant(key)}; {where}"
    if error["type"] == "missing":
        return f"the config lacks {key!r}"
    if error["type"] in ("tuple_type", "list_type"):
        return f"{key}={shown(error['input'])}: a list is needed, as {key}=[…]"
    if error["type"] == "model_type":
        return f"{key}={shown(error['input'])}: a section of keys is needed, as {key}={{key: value}}"
    return f"{key}={shown(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _meant(key: str) -> str:
    """Return `` (did you mean 'x'?)`` for the closest key; keys with the same last part come first."""
    known = list(_known_keys(Config))
    last = [other.rpartition(".")[2] for other in known]
    same = get_close_matches(key.rpartition(".")[2], set(last), cutoff=0.85)
    alike = [other for other, its in zip(known, last, strict=True) if its in same]
    return nearest(key, alike, cutoff=0) if alike else nearest(key, known)


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as ``{"local.lr": 0.1, …}``; mappings that are values (`keep_ratio`) are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and key in SECTIONS:
            flat |= {f"{key}.{inner}": own for inner, own in value.items()}
        else:
            flat[key] = value
    return flat


def is_named(key: str, names: frozenset[str]) -> bool:
    """Return whether a dotted key or its section is among these names."""
    return not names.isdisjoint((key, key.partition(".")[0]))


def _known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield prefix + name
        if (inner := section_of(info)) is not None:
            yield from _known_keys(inner, f"{prefix}{name}.")


SECTIONS = frozenset(name for name, info in Config.model_fields.items() if section_of(info) is not None)
