"""The sections of a configuration: what is told of the model, the data, the clients, their network and training."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from models.options import options_of
from sharding.client_sampling import SAMPLERS
from sharding.client_sampling.network import positive_bandwidth
from sharding.errors import UserError
from sharding.optim import DecayOf
from train.config.values import UserPath, refuse_mistaken_flag

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
    """The folder that holds it; `$SHARDING_DATA`, or else `data`, if not given."""
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
    """What `mmfl` draws by: `norm` (default), `loss`, `round_robin`, `uniform` or `full`."""
    options: dict[str, Any] = {}
    """Options of a custom sampler that have no key here."""

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
        for key in ("compute", "communicate"):
            if isinstance(law := getattr(self, key), tuple) and law[0] > law[1]:
                raise UserError(f"network.{key}={list(law)} must be the least and the most time, in this order")
        if self.bandwidth is None:
            return self
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
    optimizer: str = "scaled_sgd"
    """`scaled_sgd` (steps of a layer, not of its terms; the strategies do not clip), `sgd`, or your own."""
    lr: float = Field(default_factory=lambda its: 0.05 if its.get("optimizer") == "scaled_sgd" else 0.1, gt=0)
    """Learning rate of round 0, 0.05 of `scaled_sgd`, else 0.1; `schedule` says how it goes on."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of SGD, fresh in each round."""
    frobenius_decay: float = Field(1e-4, ge=0)
    """Strength of the decay of ‖UΩVᵀ‖²_F."""
    frobenius_decay_of: DecayOf = "bounded"
    """`effective`: UΩVᵀ, as published; `bounded`: likewise, but lowered where it would diverge; `factors`: UVᵀ."""
    loss: str = "cross_entropy"
    """What the clients lower: `cross_entropy`, or one of your own; tests always tell the cross-entropy."""
    optimizer_options: dict[str, Any] = {}
    """Options of an optimizer of your own."""
    schedule: str = "cosine"
    """How the learning rate goes over the rounds: `cosine`, `constant`, `inverse` (lr/(1 + round)), or your own."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: matrix products of the forward pass in it; all else stays float32."""

    @property
    def scales(self) -> bool:
        """Whether the steps of a layer's terms are scaled, and so not clipped."""
        return self.optimizer == "scaled_sgd"


class AggregationConfig(Section):
    """Guards against clients that are sound and yet wrong; the first two keep all updates of a round in memory."""

    norm_bound: float | None = Field(None, ge=1)
    """Leave out who changed its shard by more than this many times the round's median; none: no bound."""
    trim: float = Field(0.0, ge=0, lt=0.5)
    """β, the share of the values of each coordinate that is left out at each end; 0: the plain mean."""
    max_share: float = Field(1.0, gt=0, le=1)
    """The most that one client may have of a round's weights, which go by what it says of its size; 1: no bound.

    A federation has 0.5 if not given: no client outweighs all others, and of honest sizes hardly any is larger.
    """


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
