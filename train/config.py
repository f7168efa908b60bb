"""What a run is made of: YAML files and ``dotted.key=value`` overrides, checked before anything is computed."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from torch import nn

from models import MODELS
from sharding.clients import SAMPLERS, StatisticalSampler
from sharding.clients.network import positive_bandwidth
from sharding.compression import WIRES
from sharding.coordination import COORDINATIONS
from sharding.designs import DESIGNS
from sharding.errors import UserError, nearest, pick, shown
from sharding.optim import DecayOf
from sharding.server import SERVER_OPTIMIZERS
from sharding.strategies import get_strategy
from train.data import DATASETS
from train.partition import PARTITIONS
from train.parts import LOSSES, OPTIMIZERS, SCHEDULES, import_parts
from train.values import FileName, UserPath, refuse_mistaken_flag
from train.yaml_text import parse_yaml, read_yaml

Ratio = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]


# One number for all, or a mapping from ratio to share; a mistake is told of the one that was meant.
KeepRatio = Annotated[
    Annotated[Ratio, Tag("number")] | Annotated[dict[Ratio, Share], Tag("shares")],
    Discriminator(lambda value: "shares" if isinstance(value, Mapping) else "number"),
]
Time = Annotated[float, Field(ge=0)]
TimeLaw = Annotated[
    Annotated[Time, Tag("number")] | Annotated[tuple[Time, Time], Tag("range")],
    Discriminator(lambda value: "range" if isinstance(value, Sequence) and not isinstance(value, str) else "number"),
]
PATHS = ("output", "data.root", "network.profiles")  # given as they are on the command line: 2024 can be a folder
OF_THE_WHOLE = ("name", "rounds", "output", "clients", "network", "tasks", "evaluate_every", "alignment", "tracking")


class Section(BaseModel):
    """A part of the configuration; unknown keys, NaN, infinities, and truth values for numbers are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _flags_are_flags(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        section = isinstance(annotation, type) and issubclass(annotation, Section)
        told_anyway = section or info.field_name == "tasks" or get_origin(annotation) is Literal  # of words: which ones
        return value if told_anyway else refuse_mistaken_flag(value, annotation is bool)


class ModelConfig(Section):
    """A model's name; all other keys are options of that model."""

    model_config = ConfigDict(extra="allow")
    name: str
    """A model: `resnet18_gn`, `cct_6_3x2`, `gpt_tiny`, `gru`, `mlp` or `cnn`."""

    @property
    def options(self) -> dict[str, Any]:
        """The keys besides the name."""
        return dict(self.model_extra or {})


class DataConfig(Section):
    """A dataset and how the clients share it."""

    name: str
    """A dataset: `digits`, `cifar10`, `cifar100`, `mnist`, `tiny_imagenet` or `shakespeare`."""
    root: UserPath | None = None
    """The folder that holds it."""
    partition: str = "dirichlet"
    """`dirichlet`, `iid`, `pachinko`, `natural`, `power_law`, `power_law_classes`, `two_sizes` or `shards`."""
    partition_options: dict[str, Any] = {}
    """`classes` and `samples` of `power_law_classes`; `share`, `large`, `small` and `classes` of `two_sizes`."""
    alpha: float = Field(1.0, gt=0)
    """Concentration of `dirichlet` and `pachinko` (small: few classes a client), exponent of `power_law`."""
    fine_alpha: float = Field(10.0, gt=0)
    """Concentration within a superclass, of `pachinko`."""
    concentration: Literal["total", "per_class"] = "total"
    """Whether pachinko's two numbers are the sum of a Dirichlet law's parameters, or each of them."""
    uneven: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Share] | None = None
    """(a, b, s): of the clients with more than a and less than b samples a share s is dropped, the rest cut to a.

    Fewer than `clients.count` clients may then be left.
    """
    holdout: int | None = Field(None, ge=1)
    """Training samples, drawn at random, that no client gets and tests use in place of the test set: to tune on."""
    download: bool = False
    """Fetch an image dataset that is not under `data.root`."""
    options: dict[str, Any] = {}
    """`length` and `share` of `shakespeare`; those of a dataset of your own."""


class ClientsConfig(Section):
    """How many clients there are, how many are invited each round, and how many of them are heard."""

    count: int = Field(ge=1, le=10**6)
    """How many there are."""
    per_round: int = Field(ge=1)
    """How many are invited each round."""
    sampler: str = "uniform"
    """`uniform`, `weighted`, `full`, `uniform_scaled`, `uniform_upload`, `ocs`, `aocs`, `ocs_partial`, `mmfl`,
    `wireless` or `statistical`.
    """
    replacement: bool = False
    """Whether uniform and weighted sampling draw with replacement."""
    budget: float | None = Field(None, gt=0)
    """m, the expected number of uploads of samplers that choose after training."""
    beta_over_alpha: Annotated[float, Field(ge=0)] | Literal["pilots"] | None = None
    """β/α of wireless sampling, in units of squared norms of updates over the step size; `pilots`: learned first."""
    pilot_losses: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Training losses at which pilots with uniform and with weighted draws are compared, e.g. [1.2, 1.1, 1.0].

    Pilots teach wireless and statistical sampling G, and β/α where that is `pilots`.
    """
    signal: str | None = None
    """What mmfl goes by: `norm`, `loss`, `round_robin`, `uniform` or `full`."""

    @property
    def options(self) -> dict[str, Any]:
        """The sampler's own options."""
        options = self.model_dump(include={"replacement", "budget", "beta_over_alpha", "signal"})
        return options | ({"beta_over_alpha": None} if self.beta_over_alpha == "pilots" else {})


class NetworkConfig(Section):
    """How fast the clients are, for a simulated clock."""

    bandwidth: float | None = None
    """f_tot, the band they share; none: no clock."""
    compute: TimeLaw = 1.0
    """τ in seconds: the mean of an exponential law, or the least and the most of a uniform one."""
    communicate: TimeLaw = 1.0
    """t, seconds of sending times bandwidth; likewise."""
    profiles: UserPath | None = None
    """A CSV file with the columns `compute` and `communicate`, a row a client, in place of the two means."""

    @model_validator(mode="after")
    def _some_band(self) -> "NetworkConfig":
        if self.bandwidth is None:
            for key in ("compute", "communicate", "profiles"):
                if (value := getattr(self, key)) != type(self).model_fields[key].default:
                    raise UserError(
                        f"network.{key}={value} does nothing without network.bandwidth=…; set both or neither"
                    )
            return self
        for key in ("compute", "communicate"):
            if isinstance(law := getattr(self, key), tuple) and law[0] > law[1]:
                raise UserError(f"network.{key}={list(law)} must be the least and the most time, in this order")
        try:
            positive_bandwidth(self.bandwidth)
        except UserError as error:
            raise UserError(f"network.{error}") from error
        return self


class LocalConfig(Section):
    """A client's training in one round."""

    epochs: int = Field(2, ge=1, le=10**4)
    """Passes over its samples."""
    steps: int | None = Field(None, ge=1, le=10**6)
    """Steps that every client takes in place of epochs, each on a batch of its samples drawn with replacement."""
    batch_size: int = Field(32, ge=1)
    """Samples a step."""
    lr: float = Field(0.1, gt=0)
    """Learning rate of round 0; `schedule` says how it goes on."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of SGD, fresh in each round."""
    frobenius_decay: float = Field(1e-4, ge=0)
    """Strength of the decay of ‖UΩVᵀ‖²_F."""
    frobenius_decay_of: DecayOf = "bounded"
    """`effective`: UΩVᵀ, as published; `bounded`: likewise, but lowered where it would diverge; `factors`: UVᵀ."""
    loss: str = "cross_entropy"
    """What the clients lower: `cross_entropy`, or one of your own; tests always tell the cross-entropy."""
    optimizer: str = "sgd"
    """`sgd`, or one of your own."""
    optimizer_options: dict[str, Any] = {}
    """Options of an optimizer of your own."""
    schedule: str = "cosine"
    """How the learning rate goes over the rounds: `cosine`, `constant`, `inverse` (lr/(1 + round)), or your own."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: matrix products of the forward pass in it; all else stays float32."""


class AggregationConfig(Section):
    """Guards against updates that are sound and yet wrong; with either, all updates of a round are kept in memory."""

    norm_bound: float | None = Field(None, ge=1)
    """Leave out who changed its shard by more than this many times the round's median; none: no bound."""
    trim: float = Field(0.0, ge=0, lt=0.5)
    """β, the share of the values of each coordinate that is left out at each end; 0: the plain mean."""


class TrackingConfig(Section):
    """Where the metrics go besides `metrics.jsonl`."""

    wandb: Literal["disabled", "online", "offline"] = "disabled"
    """Weights & Biases: `disabled`, `online` or `offline`."""
    project: str = "spectral-sharding"
    """Its project."""
    entity: str | None = None
    """Whose project it is; your own if not given."""
    group: str | None = None
    """What stands together there; if not given, name, strategy and what else the directory's name tells: seeds do."""
    name: str | None = None
    """Of the run there; that of its directory if not given."""
    tags: tuple[str, ...] = ()
    """Besides the strategy, the dataset and what else the directory's name tells."""
    artifacts: bool = False
    """Whether to upload the run's files as well."""
    layers_every: int | None = Field(None, ge=1)
    """Rounds between records of λ, π and ω of every layer, besides those of the first and the last round."""
    use: tuple[str, ...] = ()
    """Trackers of one's own, by name."""

    @field_validator("wandb", mode="before")
    @classmethod
    def _off_is_disabled(cls, value: object) -> object:
        return "disabled" if value is False else value  # YAML's `off` is false


class Config(Section):
    """One training run."""

    name: FileName
    """Of the run."""
    seed: int = 0
    """Every random number follows from it."""
    world_seed: int | None = None
    """Of what is there before round 0: who has what, keep ratios, the network, the first model, pilots; else `seed`."""
    rounds: int = Field(ge=1, le=10**9)
    """How many, unless it ends earlier."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Test accuracy with which a run ends."""
    target_loss: float | None = Field(None, gt=0)
    """Training loss with which a run ends; where both targets are set, it ends when each has been reached."""
    patience: int | None = Field(None, ge=1)
    """Evaluations without a better test accuracy after which a run ends."""
    imports: tuple[str, ...] = ()
    """Modules of your own to import first: they register strategies, models, datasets, …"""
    output: UserPath | None = None
    """The run's directory; `runs/<name>-<strategy>-<what was overridden>-<seed>` if not given."""
    strategy: str = "collective"
    """Which terms are drawn, with which weight: a name in the table of strategies."""
    design: str = "cps"
    """How to draw with given probabilities: a name in the table of designs."""
    coordination: str = "independent"
    """How the draws of different clients hang together: `independent`, `spread` or `shared`."""
    clip: float = Field(10.0, ge=1, allow_inf_nan=True)
    """τ of the strategies that clip the effective learning rate, at least 1; `.inf`: none does."""
    keep_ratio: KeepRatio = 0.2
    """r of every client, or a mapping from ratio to the share of clients that have it."""
    wire: str = "float32"
    """How numbers travel, both ways: `float32`, `bfloat16` or `int8`."""
    model: ModelConfig
    data: DataConfig
    clients: ClientsConfig
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    local: LocalConfig = Field(default_factory=LocalConfig)
    start: Literal["as_built", "low_rank"] = "as_built"
    """The first model: `as_built`, or `low_rank`, with as many terms a layer as the strongest client affords."""
    server_lr: float = Field(1.0, gt=0)
    """η_g, the server's step towards the aggregate."""
    server_optimizer: str = "plain"
    """What takes that step: `plain`, `momentum`, `look_ahead` or `adam`."""
    server_momentum: float = Field(0.9, gt=0, lt=1)
    """β of the server's optimizer, where it has one."""
    aggregation: AggregationConfig = Field(default_factory=AggregationConfig)
    tasks: dict[str, dict[str, Any]] = {}
    """Models to train at once, by name, each with the keys in which it differs from this configuration."""
    engine: str = "auto"
    """What trains the cohort: `auto`, `sequential`, `stacked` or `processes`; all give the same, at another speed."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, …"""
    threads: int = Field(1, ge=1)
    """Of torch in the process that trains; sums in another number of threads round differently."""
    ways: Literal["rule", "timed"] = "rule"
    """How to choose among ways that round differently: by `rule`, or `timed` on this machine."""
    checkpoint_every: int = Field(5, ge=1)
    """Rounds between checkpoints; there is one of the last round, and one when the run is told to stop."""
    evaluate_every: int = Field(1, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    evaluate_training: bool = False
    """Whether to evaluate on the clients' samples as well."""
    alignment: bool = False
    """Whether to measure the update of each evaluated round against FedAvg's, which about doubles its cost."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return self.output or Path("runs") / f"{self.name}-{self.strategy}-{self.seed}"

    @property
    def world(self) -> int:
        """The seed of what is there before round 0."""
        return self.seed if self.world_seed is None else self.world_seed

    def evaluates(self, t: int) -> bool:
        """Return whether round t is evaluated."""
        return t % self.evaluate_every == self.evaluate_every - 1 or t == self.rounds - 1

    def task_configs(self) -> dict[str, "Config"]:
        """Return the configuration of each task: this one with the task's own keys."""
        shared = self.model_dump(exclude={"tasks"})
        shared["clients"] = {"count": self.clients.count, "per_round": self.clients.per_round}
        return {name: check_config(_merged(shared, own)) for name, own in self.tasks.items()}

    def _check_tasks(self) -> None:
        if self.tasks and self.alignment:
            raise UserError("alignment=true does nothing for tasks; leave one of them out")
        for name, own in self.tasks.items():
            if not name.isidentifier() or hasattr(nn.ModuleDict(), name):
                raise UserError(f"the task name {shown(name)} must be a plain word that means nothing else, as cifar10")
            if whole := [key for key in OF_THE_WHOLE if key in own]:
                raise UserError(f"tasks.{name}.{whole[0]} is not for one task alone; set {whole[0]} for the whole run")
        self.task_configs()

    @model_validator(mode="before")
    @classmethod
    def _import_first(cls, values: Any) -> Any:
        modules = values.get("imports") if isinstance(values, dict) else None
        import_parts([modules] if isinstance(modules, str) else [str(module) for module in modules or ()])
        return values

    @model_validator(mode="after")
    def _names_and_numbers_exist(self) -> "Config":
        get_strategy(self.strategy)
        pick(DESIGNS, self.design, "design")
        pick(COORDINATIONS, self.coordination, "coordination")
        pick(WIRES, self.wire, "wire")
        pick(MODELS, self.model.name, "model")
        pick(DATASETS, self.data.name, "dataset")
        pick(PARTITIONS, self.data.partition, "partition")
        pick(LOSSES, self.local.loss, "loss")
        pick(OPTIMIZERS, self.local.optimizer, "optimizer")
        pick(SCHEDULES, self.local.schedule, "schedule")
        pick(SERVER_OPTIMIZERS, self.server_optimizer, "server optimizer")
        clients = self.clients
        sampler = pick(SAMPLERS, clients.sampler, "sampler")
        sampler(clients.count, clients.per_round, self.seed, **clients.options)
        if sampler.chooses_tasks != bool(self.tasks):
            raise UserError("clients.sampler=mmfl and tasks={name: {…}} go together; set both or neither")
        self._check_tasks()
        if clients.beta_over_alpha == "pilots" and not (sampler.timed and clients.pilot_losses):
            raise UserError(
                "clients.beta_over_alpha=pilots needs clients.sampler=wireless and clients.pilot_losses=[…]"
            )
        if clients.pilot_losses and not issubclass(sampler, StatisticalSampler):
            raise UserError(
                f"clients.pilot_losses={list(clients.pilot_losses)} does nothing for the sampler {clients.sampler}; "
                "it is for wireless or statistical"
            )
        if self.target_loss is not None and (self.tasks or not self.evaluate_training):
            raise UserError("target_loss=… needs evaluate_training=true, which measures that loss, and one model")
        if sampler.timed and self.network.bandwidth is None:
            raise UserError(f"clients.sampler={clients.sampler} needs network.bandwidth=…, which all clients share")
        if isinstance(self.keep_ratio, dict) and abs(sum(self.keep_ratio.values()) - 1) > 1e-6:
            raise UserError(f"the shares of keep_ratio {self.keep_ratio} sum to {sum(self.keep_ratio.values())}, not 1")
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``dotted.key=value`` overrides (values in YAML), and check the whole.

    Raises:
        UserError: no such file, no valid YAML, an unknown key, or a value that is not allowed.
    """
    values = read_yaml(Path(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__}, but a config is a mapping from keys to values")
    for override in overrides:
        _override(values, override)
    return check_config(values)


def check_config(values: dict[str, Any]) -> Config:
    """Return the configuration of these values; a `UserError` tells all that is wrong with them."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError("; ".join(map(_explain, error.errors()))) from error


def _merged(shared: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `shared` with the values of `own`; sections keep their other keys, but no other model's options."""
    merged = dict(shared)
    for key, value in own.items():
        old: Any = shared.get(key)
        section = key in ("model", "data", "local", "network") and isinstance(old, dict) and isinstance(value, dict)
        other_model = section and key == "model" and value.get("name", old["name"]) != old["name"]
        merged[key] = old | value if section and not other_model else value
    return merged


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
    """Tell whether an override is taken as it is written: plain words (YAML would end them at a #), and all paths."""
    if isinstance(value, str):
        return text[:1] not in "\"'|>&!"
    return key in PATHS and value is not None


def _explain(error: ErrorDetails) -> str:
    """Turn one of pydantic's findings into a clause of our one line."""
    if isinstance(cause := error.get("ctx", {}).get("error"), UserError):
        return str(cause)
    key = ".".join(str(part)[:80] for part in error["loc"] if part not in ("number", "shares", "range", "[key]"))
    if error["type"] == "extra_forbidden":
        where = "docs/reference/configuration.md lists all keys, `python -m train config CONFIG` those of a run"
        return f"unknown config key {key!r}{_meant(key)}; {where}"
    if error["type"] == "missing":
        return f"the config lacks {key!r}"
    if error["type"] == "model_type":
        return f"{key}={shown(error['input'])}: a section of keys is needed, as {key}={{key: value}}"
    return f"{key}={shown(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _meant(key: str) -> str:
    """Return `` (did you mean 'x'?)`` for the closest key; one of the same last part comes first."""
    known = list(_known_keys(Config))
    last = [other.rpartition(".")[2] for other in known]
    same = get_close_matches(key.rpartition(".")[2], set(last), cutoff=0.85)
    alike = [other for other, its in zip(known, last, strict=True) if its in same]
    return nearest(key, alike, cutoff=0) if alike else nearest(key, known)


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as ``{"local.lr": 0.1, …}``; mappings that are values, as `keep_ratio`, stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and key in SECTIONS:
            flat |= {f"{key}.{inner}": own for inner, own in value.items()}
        else:
            flat[key] = value
    return flat


def is_named(key: str, names: frozenset[str]) -> bool:
    """Return whether a dotted key is among these names, itself or by its section."""
    return not names.isdisjoint((key, key.partition(".")[0]))


def _known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield prefix + name
        if (inner := _section_of(info)) is not None:
            yield from _known_keys(inner, f"{prefix}{name}.")


def _section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section that a key stands for, None where it stands for a value."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


SECTIONS = frozenset(name for name, info in Config.model_fields.items() if _section_of(info) is not None)
