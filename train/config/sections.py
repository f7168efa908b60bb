"""The sections of a configuration: model, data, clients, network, local training, aggregation and trackers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from sharding.client_sampling.network import positive_bandwidth
from sharding.errors import UserError
from sharding.rounds.optim import DecayOf
from train.config.parts import Part, Registry, registered
from train.config.values import Section
from train.registries import (
    DATASETS,
    LOSSES,
    MODELS,
    OPTIMIZERS,
    PARTITIONS,
    SAMPLERS,
    SCHEDULES,
    SERVER_OPTIMIZERS,
    TRACKERS,
)

Ratio = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]

# One number for all clients, or a mapping from ratio to share. The tags direct error messages to the one meant.
KeepRatio = Annotated[
    Annotated[Ratio, Tag("number")] | Annotated[dict[Ratio, Share], Tag("shares")],
    Discriminator(lambda value: "shares" if isinstance(value, Mapping) else "number"),
]
Time = Annotated[float, Field(ge=0)]
TimeDistribution = Annotated[
    Annotated[Time, Tag("number")] | Annotated[tuple[Time, Time], Tag("range")],
    Discriminator(lambda value: "range" if isinstance(value, Sequence) and not isinstance(value, str) else "number"),
]


class ModelConfig(Part):
    """The model, with its options."""

    registry = Registry("model", "model", MODELS, 2)
    name: str
    """A model: `resnet18_gn`, `cct_6_3x2`, `gpt_tiny`, `gru`, `mlp`, `cnn`, one of `transformers` or `timm`, or your
    own.
    """
    weights: str | None = None
    """Pretrained weights: a file of named tensors (safetensors, or torch's).

    For `transformers` a folder or an id on the Hugging Face hub; for `timm` a file, or `hub` for its own.
    """

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the function or class."""
        return super().options | ({"weights": self.weights} if self.takes("weights") else {})


class PartitionConfig(Part):
    """The division of the training samples among the clients, with its options."""

    registry = Registry("partition", "data.partition", PARTITIONS, 3)
    name: str = "dirichlet"
    """`dirichlet`, `iid`, `pachinko`, `natural`, `column`, `power_law`, `power_law_classes`, `two_sizes`, `shards` or
    your own.
    """


class DataConfig(Part):
    """The dataset with its options, and its partition among the clients."""

    options_kept = ("root", "download")
    registry = Registry("dataset", "data", DATASETS, 0)
    name: str
    """A dataset: `digits`, `cifar10`, `cifar100`, `mnist`, `tiny_imagenet`, `shakespeare`, `synthetic`, your
    own `files`, or your own function.
    """
    partition: PartitionConfig = Field(default_factory=PartitionConfig)
    holdout: int | None = Field(None, ge=1)
    """Number of random training samples that no client gets.

    Evaluations use them instead of the test set, for tuning.
    """

    @model_validator(mode="after")
    def _check_column(self) -> Self:
        if self.partition.name == "column" and not self.takes("client"):
            raise UserError(f"data.partition=column needs data=files, which has columns; {self.name} has none")
        return self


class SamplerConfig(Part):
    """The sampler, which chooses the clients that take part in a round, with its options."""

    registry = Registry("sampler", "clients.sampler", SAMPLERS, 4)
    name: str = "uniform"
    """`uniform`, `poisson`, `weighted`, `uniform_scaled`, `uniform_upload`, `ocs`, `aocs`, `ocs_partial`, `mmfl`,
    `wireless`, `statistical` or your own.
    """


class ClientsConfig(Section):
    """The clients."""

    count: int = Field(ge=1, le=10**6)
    """Number of clients."""
    per_round: int = Field(ge=1)
    """Number of clients invited each round."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    pilot_losses: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Training losses, such as [1.2, 1.1, 1.0], at which uniform and weighted pilots are compared before round 0.

    Pilots measure G for `wireless` and `statistical`, and β/α of `wireless` if it is not set.
    """


class NetworkConfig(Section):
    """The clients' speeds, for simulated time."""

    bandwidth: float
    """f_tot, the bandwidth that all clients share."""
    compute: TimeDistribution = 1.0
    """τ, seconds of computing: the mean of an exponential distribution, or [least, most] of a uniform one."""
    communicate: TimeDistribution = 1.0
    """t, seconds of sending times bandwidth: a mean or [least, most], as `compute`."""

    @model_validator(mode="after")
    def _check_numbers(self) -> "NetworkConfig":
        for key in ("compute", "communicate"):
            if isinstance(bounds := getattr(self, key), tuple) and bounds[0] > bounds[1]:
                raise UserError(f"network.{key}={list(bounds)} must be [least, most], in this order")
        try:
            positive_bandwidth(self.bandwidth)
        except UserError as error:
            raise UserError(f"network.{error}") from error
        return self


class OptimizerConfig(Part):
    """The clients' optimizer, with its options. A round's schedule multiplies its learning rate."""

    registry = Registry("optimizer", "local.optimizer", OPTIMIZERS, 1)
    name: str
    """`sgd`, `adam`, `adamw`, `adagrad`, `adafactor`, `rmsprop`, with torch's arguments, or your own."""


class ScheduleConfig(Part):
    """The clients' learning rate over the rounds, with its options."""

    registry = Registry("schedule", "local.schedule", SCHEDULES, 3)
    name: str = "cosine"
    """`cosine`, `constant`, `inverse` (lr/(1 + round)) or your own."""


class LocalConfig(Section):
    """Local training of a client in one round."""

    epochs: int = Field(2, ge=1, le=10**4)
    """Passes over the client's samples."""
    steps: int | None = Field(None, ge=1, le=10**6)
    """Number of steps instead of epochs, each on a batch drawn with replacement."""
    batch_size: int = Field(32, ge=1)
    """Samples a step."""
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    clip: float = Field(10.0, ge=1, allow_inf_nan=True)
    """τ ≥ 1 of strategies that clip the effective learning rate. `.inf` turns clipping off."""
    decay: float = Field(1e-4, ge=0)
    """Strength of the decay of ‖UΩVᵀ‖²_F."""
    decay_of: DecayOf = "bounded"
    """The decay: as published (`effective`), or weaker where that would diverge (`bounded`)."""
    loss: Annotated[str, AfterValidator(partial(registered, LOSSES, "loss"))] = "cross_entropy"
    """Training loss: `cross_entropy` or your own. Evaluations always report the cross-entropy."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16` computes the matrix products of the forward pass in that format; all else stays float32."""
    checkpoint: bool = False
    """Whether the model's blocks forget their activations, and compute them again in the backward pass.

    The same bits for less memory and up to a third more time; with `compile`, the same up to rounding.
    """
    compile: bool = False
    """Whether `torch.compile` compiles the model of each keep ratio, which takes up to minutes at the start.

    The same numbers, up to rounding. The smaller last batches of an epoch are not compiled.
    """


class ServerOptimizerConfig(Part):
    """The server's optimizer, which takes the clients' average minus the model as a negative gradient."""

    registry = Registry("server optimizer", "server_optimizer", SERVER_OPTIMIZERS, 1)
    name: str
    """`plain`, `momentum`, `nesterov`, `fedadam`, `fedyogi`, one of `local.optimizer`, or your own."""


class AggregationConfig(Section):
    """How updates are averaged."""

    max_share: float | None = Field(None, gt=0, le=1)
    """Largest share of a round's weights that one client can have.

    Default: 1, and 0.5 in a federation, which cannot check the clients' sizes.
    """


class PrivacyConfig(Section):
    """Differential privacy of each client: see docs/guides/privacy.md."""

    clipping_norm: float = Field(gt=0)
    """B, the largest norm of a client's change in a round; longer changes are scaled to it."""
    noise_multiplier: float = Field(ge=0)
    """z: the sums of changes get noise of standard deviation z·B. With 0 there is no privacy, and ε is infinite."""
    delta: float = Field(gt=0, lt=1)
    """δ at which ε is measured; below one over the number of clients."""
    max_epsilon: float | None = Field(None, gt=0)
    """The run ends before a round after which ε would be larger."""
    secret_seed: int | None = Field(None, ge=0)
    """Seed of the noise and of the clients' draws, for tests: whoever knows it can take the noise away.

    Default: random bits of the system, kept in the run's directory for its owner.
    """


class TrackerConfig(Part):
    """A tracker, which receives the metrics in addition to `metrics.jsonl`, with its options."""

    registry = Registry("tracker", "tracker", TRACKERS, 1)
    name: str
    """`wandb` or your own."""
