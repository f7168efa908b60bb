"""What an engine is."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sharding import Plan, Shard
from sharding.planner import Client


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
    failure: str | None = None


class Engine(Protocol):
    """Trains every client of a plan on its own shard and its own data."""

    def train(self, plan: Plan, round: int, lr: float) -> dict[Client, Update]:
        """Return one update per client of the plan; a client's failure is an update that says so."""
        ...
