"""The sections of a configuration: model, data, clients, network, local training, aggregation and tracking."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from models.options import options_of
from sharding.client_sampling import SAMPLERS
from sharding.client_sampling.network import positive_bandwidth
from sharding.errors import UserError
from sharding.optim import DecayOf
from train.config.values import UserPath, refuse_mistaken_flag

Ratio = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]

# One number for all clients, or a mapping from ratio to share. The tags direct error messages to the one meant.
KeepRatio = Annotated[
    Annotated[Ratio, Tag("number")] | Annotated[dict[Ratio, Share], Tag("shares")],
    Discriminator(lambda value: "shares" if isinstance(value, Mapping) else "number"),
]
Time = Annotated[float, Field(ge=0)]
TimeLaw = Annotated[
    Annotated[Time, Tag("number")] | Annotated[tuple[Time, Time], Tag("range")],
    Discriminator(lambda value: "range" if isinstance(value, Sequence) and not isinstance(value, str) else "number"),
]


class Section(BaseModel):
    """A part of the configuration. Unknown keys, NaN, infinities, and true or false for a number are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # a clip of inf stays one
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _flags_are_flags(cls, value: object, info: ValidationInfo) -> object:
        its = cls.model_fields[info.field_name or ""]
        annotation = its.annotation
        refused_anyway = section_of(its) or info.field_name == "tasks" or get_origin(annotation) is Literal
        return value if refused_anyway else refuse_mistaken_flag(value, annotation is bool)


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section of a key, or None if the key has a value."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


class ModelConfig(Section):
    """A model's name; all other keys are options of that model. An override of the name drops the file's options."""

    model_config = ConfigDict(extra="allow")
    name: str
    """A model: `resnet18_gn`, `cct_6_3x2`, `gpt_tiny`, `gru`, `mlp` or `cnn`."""

    @property
    def options(self) -> dict[str, Any]:
        """All keys but the name."""
        return dict(self.model_extra or {})


class DataConfig(Section):
    """The dataset and its partition among the clients."""

    name: str
    """A dataset: `digits`, `cifar10`, `cifar100`, `mnist`, `tiny_imagenet`, `shakespeare`, `synthetic` or your own."""
    root: UserPath | None = None
    """Folder that holds the dataset. Default: `$SHARDING_DATA`, or else `data`."""
    partition: str = "dirichlet"
    """`dirichlet`, `iid`, `pachinko`, `natural`, `power_law`, `power_law_classes`, `two_sizes`, `shards` or your own.
    """
    partition_options: dict[str, Any] = {}
    """Options: `classes` and `samples` of `power_law_classes`; `share`, `large`, `small` and `classes` of `two_sizes`;
    those of your own partition.
    """
    alpha: float = Field(1.0, gt=0)
    """Concentration of `dirichlet` and `pachinko`, where a small value gives a client few classes.

    Exponent of `power_law`.
    """
    fine_alpha: float = Field(10.0, gt=0)
    """Concentration of `pachinko` within a superclass."""
    concentration: Literal["total", "per_class"] = "total"
    """Whether alpha and fine_alpha of `pachinko` are the sum of a Dirichlet law's parameters (`total`) or each of them.
    """
    holdout: int | None = Field(None, ge=1)
    """Number of random training samples that no client gets.

    Evaluations use them instead of the test set, for tuning.
    """
    download: bool = False
    """Whether to download `cifar10`, `cifar100` or `mnist` if it is not in `data.root`."""
    options: dict[str, Any] = {}
    """Options of the dataset: `length` and `share` of `shakespeare`; `alpha`, `beta`, `clients`, `samples` and `seed`
    of `synthetic`; those of your own.
    """


class ClientsConfig(Section):
    """The clients, and the sampler that chooses which of them take part in a round."""

    count: int = Field(ge=1, le=10**6)
    """Number of clients."""
    per_round: int = Field(ge=1)
    """Number of clients invited each round."""
    sampler: str = "uniform"
    """`uniform`, `weighted`, `uniform_scaled`, `uniform_upload`, `ocs`, `aocs`, `ocs_partial`, `mmfl`,
    `wireless`, `statistical` or your own.
    """
    replacement: bool = False
    """Whether `uniform` and `weighted` draw clients with replacement."""
    budget: float | None = Field(None, gt=0)
    """m, the expected number of uploads a round, of `uniform_upload`, `ocs`, `aocs`, `ocs_partial` and `mmfl`."""
    beta_over_alpha: Annotated[float, Field(ge=0)] | Literal["pilots"] | None = None
    """β/α of `wireless`, in units of (norm of an update over the step size)². `pilots` measures it before round 0."""
    pilot_losses: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Training losses, such as [1.2, 1.1, 1.0], at which uniform and weighted pilots are compared.

    Pilots measure G for `wireless` and `statistical`, and β/α if that is `pilots`.
    """
    signal: str | None = None
    """Signal by which `mmfl` draws: `norm` (default), `loss`, `round_robin`, `uniform` or `full`."""
    options: dict[str, Any] = {}
    """Options of your own sampler that have no key here."""

    @property
    def sampler_options(self) -> dict[str, Any]:
        """The keyword arguments of the sampler: its options among the keys of this section, and `options`."""
        shared = {option: getattr(self, option) for option in self.shared_options(self.sampler)}
        return {option: value for option, value in shared.items() if value not in (None, "pilots")} | self.options

    @classmethod
    def shared_options(cls, sampler: str) -> list[str]:
        """Return the options of a sampler that are keys of this section."""
        return [option for option in options_of(SAMPLERS[sampler]) if option in cls.model_fields]


class NetworkConfig(Section):
    """The clients' speeds, for simulated time."""

    bandwidth: float | None = None
    """f_tot, the bandwidth that all clients share. Without it, time is not simulated."""
    compute: TimeLaw = 1.0
    """τ, seconds of computing: the mean of an exponential law, or [least, most] of a uniform law."""
    communicate: TimeLaw = 1.0
    """t, seconds of sending times bandwidth: a mean or [least, most], as `compute`."""

    @model_validator(mode="after")
    def _some_band(self) -> "NetworkConfig":
        for key in ("compute", "communicate"):
            if isinstance(law := getattr(self, key), tuple) and law[0] > law[1]:
                raise UserError(f"network.{key}={list(law)} must be [least, most], in this order")
        if self.bandwidth is None:
            return self
        try:
            positive_bandwidth(self.bandwidth)
        except UserError as error:
            raise UserError(f"network.{error}") from error
        return self


class LocalConfig(Section):
    """Local training of a client in one round."""

    epochs: int = Field(2, ge=1, le=10**4)
    """Passes over the client's samples."""
    steps: int | None = Field(None, ge=1, le=10**6)
    """Number of steps instead of epochs, each on a batch drawn with replacement."""
    batch_size: int = Field(32, ge=1)
    """Samples a step."""
    optimizer: str = "sgd"
    """`sgd` or your own."""
    lr: float = Field(0.02, gt=0)
    """Learning rate of round 0. `schedule` changes it over the rounds."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD, which starts at zero in each round."""
    frobenius_decay: float = Field(1e-4, ge=0)
    """Strength of the decay of ‖UΩVᵀ‖²_F."""
    frobenius_decay_of: DecayOf = "bounded"
    """The decay: as published (`effective`), or weaker where that would diverge (`bounded`)."""
    loss: str = "cross_entropy"
    """Training loss: `cross_entropy` or your own. Evaluations always report the cross-entropy."""
    optimizer_options: dict[str, Any] = {}
    """Options of your own optimizer."""
    schedule: str = "cosine"
    """Learning rate over the rounds: `cosine`, `constant`, `inverse` (lr/(1 + round)) or your own."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16` computes the matrix products of the forward pass in that format; all else stays float32."""


class AggregationConfig(Section):
    """Guards against updates that are well-formed but wrong."""

    norm_bound: float | None = Field(None, ge=1)
    """Leaves out updates whose norm is more than this many times the round's median.

    Keeps all updates of a round in memory.
    """
    trim: float = Field(0.0, ge=0, lt=0.5)
    """β, the share of values that a trimmed mean leaves out at each end of each coordinate; 0 is the plain mean.

    Keeps all updates of a round in memory.
    """
    max_share: float = Field(1.0, gt=0, le=1)
    """Largest share of a round's weights that one client can have.

    A federation, which cannot check the clients' sizes, has 0.5 by default.
    """


class TrackingConfig(Section):
    """Trackers that receive the metrics in addition to `metrics.jsonl`."""

    wandb: Literal["disabled", "online", "offline"] = "disabled"
    """Weights & Biases: `disabled`, `online` or `offline`."""
    project: str = "spectral-sharding"
    """W&B project."""
    entity: str | None = None
    """W&B entity. Default: your own."""
    group: str | None = None
    """W&B group. Default: name, strategy and overridden settings, so that seeds share a group."""
    name: str | None = None
    """Name of the W&B run. Default: the name of its directory."""
    tags: tuple[str, ...] = ()
    """More W&B tags; the strategy, the dataset and the overridden settings are tags anyway."""
    artifacts: bool = False
    """Whether to upload the run's files to W&B."""
    layers_every: int | None = Field(None, ge=1)
    """Rounds between records of λ, π and ω of every layer. The first and the last round always have one."""
    use: tuple[str, ...] = ()
    """Names of your own trackers."""

    @field_validator("wandb", mode="before")
    @classmethod
    def _off_is_disabled(cls, value: object) -> object:
        return "disabled" if value is False else value  # YAML's `off` is false
