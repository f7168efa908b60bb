"""The configuration of a run: YAML files and ``dotted.key=value`` overrides, checked before anything is computed."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from torch import nn

from sharding.client_sampling import SAMPLERS, StatisticalSampler, TaskSampler, WirelessSampler
from sharding.errors import UserError, lookup, safe_repr
from sharding.matrices.quantization import Format
from sharding.terms.designs import DESIGNS
from sharding.terms.strategies import get_strategy
from sharding.transport.compression import COMPRESSIONS
from train.config.messages import explain
from train.config.parts import Part, as_mapping, registered
from train.config.sections import (
    AggregationConfig,
    ClientsConfig,
    DataConfig,
    KeepRatio,
    LocalConfig,
    ModelConfig,
    NetworkConfig,
    PrivacyConfig,
    ServerOptimizerConfig,
    TrackerConfig,
)
from train.config.values import FileName, Section, UserPath, section_of
from train.config.yaml_text import parse_yaml, read_yaml
from train.registries import import_parts

PATHS = ("output", "data.root")  # taken literally from the command line: 2024 can be a folder
RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
RUN_LEVEL_KEYS = (  # which cannot differ between tasks
    *("name", "rounds", "output", "clients", "network", "tasks", "evaluate_every", "alignment", "tracker", "privacy"),
    *("evaluate_training", "target_accuracy", "target_loss", "checkpoint_every", "threads", "plugins", "recipe"),
)


def _strategy_name(name: str) -> str:
    get_strategy(name)
    return name


class Config(Section):
    """One training run. The `recipe`, a file in `configs/recipes`, sets the keys that the configuration leaves out."""

    name: FileName
    """Name of the run."""
    seed: int = Field(0, ge=0)
    """Seed of every random number."""
    data_seed: int | None = Field(None, ge=0)
    """Seed of everything before round 0: the partition, keep ratios, the network, the first model and pilots.

    Default: `seed`.
    """
    rounds: int = Field(ge=1, le=10**9)
    """Number of rounds, unless the run ends earlier."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Test accuracy at which the run ends."""
    target_loss: float | None = Field(None, gt=0)
    """Training loss at which the run ends. With both targets, the run ends once each has been reached."""
    plugins: tuple[str, ...] = ()
    """Modules to import first, which register your own parts. Overrides and `--import` add to those of the file."""
    output: UserPath | None = None
    """Directory of the run. Default: below `runs`, named after the name, the strategy, the overrides and the seed."""
    strategy: Annotated[str, AfterValidator(_strategy_name)]
    """The terms that clients receive, and their weights: a name in the table of strategies."""
    design: Annotated[str, AfterValidator(partial(registered, DESIGNS, "design"))] = "cps"
    """The way to draw terms with given probabilities: a name in the table of designs."""
    keep_ratio: KeepRatio = 0.2
    """r, the share of each layer's terms that a client trains.

    A mapping gives the share of clients that have each r.
    """
    skip: tuple[str, ...] | None
    """Layers that are sent whole: names, shell patterns, `first` and `last`.

    With `null` they are those that the model names, as `resnet18_gn` does its shortcuts too, or the first and the last.
    """
    compression: Annotated[str, AfterValidator(partial(registered, COMPRESSIONS, "compression"))] = "float32"
    """Number format of shards in both directions: `float32`, `bfloat16` or `int8`."""
    model: ModelConfig
    data: DataConfig
    clients: ClientsConfig
    network: NetworkConfig | None = None
    """The clients' speeds. Without them, time is not simulated."""
    local: LocalConfig
    init: Literal["low_rank", "as_built"]
    """First model: `as_built`, or `low_rank`, which keeps as many terms of each sharded layer as the median client can
    afford; with a `residual`, as the strongest.
    """
    residual: Format | None = None
    """Format of what `init=low_rank` cuts off and each client keeps, frozen: `int4`, `int8`, `bfloat16` or `float32`.

    Without one it is lost. It is sent to a client once.
    """
    tail: Format | None
    """Format in which a weak client also holds, frozen, the terms that only stronger clients of the round train.

    `int4`, `int8`, `bfloat16` or `float32`; `null` leaves them out. For `strategy=top_n`: strategies that draw terms
    have no tail.
    """
    server_optimizer: ServerOptimizerConfig
    result: Literal["average", "last"]
    """Model to evaluate and save: the `average` of the rounds' models, which weights late rounds most, or the `last`
    one.
    """
    aggregation: AggregationConfig = Field(default_factory=AggregationConfig)
    privacy: PrivacyConfig | None = None
    """Differential privacy of each client. All clients count alike then, whatever their samples."""
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Models to train at once, by name. Each has the keys in which it differs from this configuration."""
    engine: str = "auto"
    """How clients are trained: `sequential`, side by side on one GPU in `lanes`, in `processes`, one per core or GPU,
    or by `ray` on a cluster.

    On a CPU all give the same bits. `auto` chooses one of the first three.
    """
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, or one of several GPUs, as `cuda:1`."""
    threads: int = Field(1, ge=1)
    """Torch threads of a training process. Another number rounds sums differently."""
    checkpoint_every: int = Field(5, ge=1)
    """Most rounds between checkpoints.

    There is also one when the last is a minute old, after the last round, and when the run is stopped.
    """
    evaluate_every: int = Field(1, ge=1)
    """Rounds between evaluations. The last round is always evaluated."""
    evaluate_training: bool = False
    """Whether to evaluate on the clients' samples too."""
    alignment: bool = False
    """Whether to compare the update of each evaluated round with FedAvg's, which about doubles its cost."""
    tracker: tuple[TrackerConfig, ...] = ()
    """Trackers that receive the metrics in addition to `metrics.jsonl`: one, or a list."""

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

    def models(self) -> list["Config"]:
        """Return the configuration of each model: this one, or with `tasks` this one with the name and keys of each."""
        if not self.tasks:
            return [self]
        shared = self.model_dump(exclude={"tasks"}) | {"output": self.directory}
        shared["clients"] = {"count": self.clients.count, "per_round": self.clients.per_round}
        configs = []
        for name, task in self.tasks.items():
            try:
                configs.append(check_config(merge(shared | {"name": name}, task)))
            except UserError as error:
                raise UserError(f"tasks.{name}: {error}") from error
        return configs

    def __reduce__(self) -> tuple[Any, ...]:
        """Check the configuration again in another process, which imports its plugins there."""
        return check_config, (self.model_dump(),)

    def _check_tasks(self) -> None:
        if self.tasks and self.alignment:
            raise UserError("alignment=true does nothing for tasks; leave one of them out")
        for name, task in self.tasks.items():
            if not name.isidentifier() or hasattr(nn.ModuleDict(), name):
                raise UserError(
                    f"the task name {safe_repr(name)} must be a word that modules have no attribute of, e.g. cifar10"
                )
            if shared := [key for key in RUN_LEVEL_KEYS if key in task]:
                raise UserError(f"tasks.{name}.{shared[0]} cannot differ between tasks; set {shared[0]} for all")
        self.models()

    @model_validator(mode="before")
    @classmethod
    def _import_plugins(cls, values: Any) -> Any:
        import_parts(plugins_of(values))
        return values

    @field_validator("tracker", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | Mapping) else value or []

    def _check_private(self) -> None:
        """Refuse, with privacy, what reads single updates or the clients' data in the clear."""
        assert self.privacy is not None
        clients, max_share = self.clients, self.aggregation.max_share
        if clients.sampler.name not in ("poisson", "uniform") or clients.sampler.options.get("replacement"):
            raise UserError(
                f"clients.sampler={clients.sampler.name} draws clients in a way that privacy has no account of; use "
                "poisson, or uniform without replacement"
            )
        for is_set, name, reason in (
            (max_share is not None, "aggregation.max_share", "needs weights, and with privacy all are equal"),
            (self.alignment, "alignment", "averages updates without noise"),
            (self.evaluate_training, "evaluate_training", "measures the clients' samples without noise"),
            (self.network is not None, "network", "simulates times, which tell who took part"),
            (bool(self.tasks), "tasks", "releases several models, which have no common account"),
        ):
            if is_set:
                raise UserError(f"{name} {reason}; leave out {name} or privacy")
        if self.privacy.delta >= 1 / clients.count:
            raise UserError(
                f"privacy.delta={self.privacy.delta:g} would allow to publish a client's data whole; use less than "
                f"1/clients.count={1 / clients.count:g}, such as 1e-5"
            )

    @model_validator(mode="after")
    def _check_together(self) -> "Config":
        clients, sampler = self.clients, SAMPLERS[self.clients.sampler.name]
        if clients.per_round > clients.count:
            raise UserError(f"clients.per_round={clients.per_round} must be at most clients.count={clients.count}")
        if issubclass(sampler, TaskSampler) != bool(self.tasks):
            raise UserError("clients.sampler=mmfl and tasks={name: {…}} need each other; set both or neither")
        if self.privacy is not None:
            self._check_private()
        self._check_tasks()
        if self.target_loss is not None and (self.tasks or not self.evaluate_training):
            raise UserError("target_loss=… needs evaluate_training=true, which measures that loss, and one model")
        if issubclass(sampler, WirelessSampler) and self.network is None:
            raise UserError(
                f"clients.sampler={clients.sampler.name} needs network.bandwidth=…, which all clients share"
            )
        if clients.pilot_losses and not issubclass(sampler, StatisticalSampler):
            raise UserError(
                f"clients.pilot_losses={list(clients.pilot_losses)} needs clients.sampler=wireless or statistical, "
                f"which use what pilots measure; with {clients.sampler.name} set clients.pilot_losses=[]"
            )
        if self.residual is not None and self.init != "low_rank":
            raise UserError(f"residual={self.residual} needs init=low_rank, which leaves one; init is {self.init}")
        if self.residual is not None and get_strategy(self.strategy).allocate is None:
            raise UserError(f"residual={self.residual} needs a strategy with terms; {self.strategy} has none")
        if self.residual is not None and self.alignment:
            raise UserError("alignment=true trains the whole model, and residual=… freezes most of it; leave one out")
        if isinstance(self.keep_ratio, dict) and abs(sum(self.keep_ratio.values()) - 1) > 1e-6:
            raise UserError(f"the shares of keep_ratio {self.keep_ratio} sum to {sum(self.keep_ratio.values())}, not 1")
        return self


def plugins_of(values: Any) -> list[str]:
    """Return the modules that an unchecked configuration names; none for a value that pydantic refuses."""
    named = values.get("plugins") if isinstance(values, dict) else None
    modules = [named] if isinstance(named, str) else named
    return [str(module) for module in modules] if isinstance(modules, list | tuple) else []


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, set ``dotted.key=value`` overrides (values in YAML) into it, and check the result.

    An override of a part's name drops the options that the file has for another part.

    Raises:
        UserError: no such file, invalid YAML, an unknown key, or an invalid value.
    """
    values = read_yaml(Path(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path} has {type(values).__name__}, but a config is a mapping from keys to values")
    file, plugins = values, plugins_of(values)
    for key, value in parse_overrides(overrides):
        *sections, last = key.split(".")
        change = {last: value}
        for section in reversed(sections):
            change = {section: change}
        base = values if key != "tasks" else values | {"tasks": {}}  # one set of tasks replaces another
        values = merge(base, change)
    if isinstance(values.get("plugins"), list):  # those of the file are needed as well
        values["plugins"] = [*dict.fromkeys([*plugins, *plugins_of(values)])]
    config = check_config(values)
    recipe = values.get("recipe")
    if recipe != file.get("recipe") and flatten(recipe_of(values)).keys() <= flatten(file).keys():
        raise UserError(f"recipe={recipe} changes nothing: {path} sets all of its keys; remove them there")
    return config


def parse_overrides(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """Return the key and the value of each override, sections before their keys and names before options.

    Raise a UserError if an override is not ``dotted.key=value``, or its value is not YAML.
    """
    parsed = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"cannot read the override {override!r}; write dotted.key=value, e.g. rounds=10")
        try:
            value = parse_yaml(text)
        except UserError as error:
            raise UserError(f"cannot read the value {safe_repr(text)} of {safe_repr(key)} as YAML: {error}") from error
        # Paths, and plain words, which YAML would cut at a #, are taken literally.
        literal = text[:1] not in "\"'|>&!" if isinstance(value, str) else key in PATHS and value is not None
        parsed.append((key, text.strip() if literal else value))
    return sorted(parsed, key=lambda pair: (pair[0].count("."), not pair[0].endswith(".name")))


def check_config(values: Mapping[str, Any]) -> Config:
    """Return the configuration of these values and, for keys that they lack, of their recipe (default `tuned`).

    Raise a UserError that names all unknown keys and invalid values, or if the values are not a mapping.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"it has {type(values).__name__}, but a config is a mapping from keys to values")
    given = {key: value for key, value in values.items() if key != "recipe"}
    try:
        return Config.model_validate(merge(recipe_of(values), given))
    except ValidationError as error:
        raise UserError(explain(error, Config)) from error


def recipe_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the recipe of a configuration sets; raise a UserError if there is no such recipe."""
    return _read_recipe(
        lookup({path.stem: path for path in RECIPES.glob("*.yaml")}, values.get("recipe", "tuned"), "recipe")
    )


@cache
def _read_recipe(path: Path) -> dict[str, Any]:
    return read_yaml(path)


class _Tasks(Section):
    """The key `tasks`, whose values are configurations."""


def section_at(section: type[Section], key: str) -> type[Section] | None:
    """Return the section that a key of a section holds; None for a value, and for an unknown key."""
    if section is _Tasks:
        return Config
    if section is Config and key == "tasks":
        return _Tasks
    return section_of(section, key) if key in section.model_fields else None


def merge(base: Mapping[str, Any], changes: Mapping[str, Any], section: type[Section] = Config) -> dict[str, Any]:
    """Return the values of a section with changes, section by section. A part with another name loses its options."""
    merged = dict(base)
    if issubclass(section, Part) and changes.get("name", base.get("name")) != base.get("name"):
        kept = {*section.model_fields, *section.shared_options(changes["name"])}
        merged = {key: value for key, value in base.items() if key in kept}
    for key, value in changes.items():
        inner, old, new = section_at(section, key), merged.get(key), value
        if inner is not None and issubclass(inner, Part):
            old, new = as_mapping(old[0] if isinstance(old, list | tuple) and len(old) == 1 else old), as_mapping(new)
        if inner is not None and isinstance(new, Mapping):
            merged[key] = merge(old if isinstance(old, Mapping) else {}, new, inner)
        else:
            merged[key] = value
    return merged


def flatten(values: Mapping[str, Any], section: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """Return a configuration as ``{"rounds": 3, "model": "mlp", "model.width": 8, …}``.

    Mappings that are values (`keep_ratio`, `tasks`) stay, and a part's key has its name.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = section_at(section, key)
        if key == "name" and issubclass(section, Part):
            flat[prefix.removesuffix(".")] = value
        elif inner is None or inner is _Tasks or not isinstance(value, Mapping):
            flat[prefix + key] = value
        else:
            flat |= flatten(value, inner, f"{prefix}{key}.")
    return flat


def is_named(key: str, names: frozenset[str]) -> bool:
    """Return whether a dotted key or a section around it is among these names."""
    ends = (end for end, letter in enumerate(f"{key}.") if letter == ".")
    return any(key[:end] in names for end in ends)
