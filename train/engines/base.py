"""The interface of an engine."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from sharding import Plan, Shard
from sharding.failures import Failure
from sharding.planner import Client
from train.config.sections import LocalConfig
from train.data import Dataset, Split


@dataclass(frozen=True)
class Update:
    """What a client sends back.

    Attributes:
        shard: the trained shard, or None if the client failed.
        loss: its mean training loss, a scalar on the device, or None.
        failure: why the client failed, or None.
    """

    shard: Shard | None
    loss: Tensor | None
    failure: Failure | None = None


@dataclass(frozen=True)
class Receipt:
    """The facts about an update that remain after it is summed: its loss, its failure, and its size in bytes."""

    loss: Tensor | None
    failure: Failure | None
    nbytes: int


Updates = Iterator[tuple[Client, Update]]


@dataclass(frozen=True)
class Job:
    """What an engine trains, the same in every round.

    Attributes:
        model: the server's model, for its architecture only.
        clients: each client's samples, on the device.
        dataset: prepares and augments them.
        local: epochs, batch size and so on.
        clip: τ, or None for no clipping.
        seed: of the run.
        plugins: modules with custom parts, which new processes import.
        step_scales: factors of some clients' step sizes.
    """

    model: nn.Module
    clients: Mapping[Client, Split]
    dataset: Dataset
    local: LocalConfig
    clip: float | None
    seed: int
    plugins: Sequence[str] = ()
    step_scales: Mapping[Client, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of the data, on which clients are trained."""
        return self.dataset.test.targets.device

    def to(self, device: torch.device | str) -> "Job":
        """Return the same job on another device."""
        if self.device == torch.device(device):
            return self
        clients = {client: data.to(device) for client, data in self.clients.items()}
        return replace(self, model=deepcopy(self.model).to(device), clients=clients, dataset=self.dataset.to(device))

    def step_size(self, client: Client, lr: float) -> float:
        """Return a client's own step size in a round whose step size is lr."""
        return lr * self.step_scales.get(client, 1.0)


class Engine(Protocol):
    """Trains every client of a plan on its own shard and its own data."""

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield one update for each client as it arrives, so that memory does not grow with the cohort.

        The order depends only on the plan and the clients' data. The update of a client that failed says why.
        """
        ...

    def close(self) -> None:
        """Release the engine's processes, if any."""
        ...
