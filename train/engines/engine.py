"""The interface of an engine."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from sharding import Frozen, Plan, Update
from sharding.rounds.failures import Failure
from sharding.rounds.plan import Client
from train.config.sections import LocalConfig
from train.data import Dataset, Split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """What came back from a client.

    Attributes:
        update: None if the client failed.
        loss: the client's mean training loss, a scalar on the device, or None.
        failure: why the client failed, or None.
    """

    update: Update | None
    loss: Tensor | None
    failure: Failure | None = None

    @classmethod
    def of_error(cls, client: Client, round: int, error: Exception) -> Self:
        """Return the reply of a client whose training failed, which never stops a round; log the reason."""
        failure = Failure.in_training(error)
        shown = error if log.isEnabledFor(logging.DEBUG) else None
        log.warning("client %s failed in round %d: %s", client, round, failure, exc_info=shown)
        return cls(None, None, failure)


Replies = Iterable[tuple[Client, Reply]]


@dataclass(frozen=True)
class Job:
    """What an engine trains, the same in every round.

    Attributes:
        model: the server's model, for its architecture only.
        clients: the samples of each client, on the device.
        dataset: prepares and augments them.
        local: epochs, batch size and so on.
        seed: the seed of the run.
        plugins: modules with custom parts, which new processes import.
        lr_scales: factors of some clients' learning rates.
        frozen: the frozen part, which every client has.
        one_device: whether clients are trained on the data's device only, of several GPUs.
    """

    model: nn.Module
    clients: Mapping[Client, Split]
    dataset: Dataset
    local: LocalConfig
    seed: int
    plugins: Sequence[str] = ()
    lr_scales: Mapping[Client, float] = field(default_factory=dict)
    frozen: Frozen = field(default_factory=partial(Frozen, {}))
    one_device: bool = False

    @property
    def device(self) -> torch.device:
        """The device of the data, on which clients are trained."""
        return self.dataset.test.targets.device

    def to(self, device: torch.device | str) -> "Job":
        """Return the same job on another device."""
        if self.device == torch.device(device):
            return self
        clients = {client: data.to(device) for client, data in self.clients.items()}
        model, frozen = deepcopy(self.model).to(device), self.frozen.to(device)
        return replace(self, model=model, clients=clients, dataset=self.dataset.to(device), frozen=frozen)

    def lr(self, client: Client, lr: float) -> float:
        """Return a client's learning rate in a round whose learning rate is lr."""
        return lr * self.lr_scales.get(client, 1.0)


class Engine(ABC):
    """Trains every client of a plan on its own shard and its own data."""

    @abstractmethod
    def train(self, plan: Plan, round: int, lr: float) -> Replies:
        """Yield one reply for each client as it arrives, so that memory does not grow with the cohort.

        The order depends only on the plan and the clients' data. The reply of a client that failed has the reason.
        """

    def close(self) -> None:  # noqa: B027  # most engines have nothing to release
        """Release the engine's processes, if any."""
