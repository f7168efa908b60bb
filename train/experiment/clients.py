"""The table of a run's clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sharding.rounds.plan import Client
from train.data.shares import Shares


@dataclass(frozen=True)
class Clients:
    """The clients of a run.

    Attributes:
        data: The samples of each client, on the device; empty where they are on other machines.
        num_samples: D_c of each client.
        keep_ratios: r of each client.
        node_keys: In a federation, a digest of the public key of each client's node.
    """

    data: Shares
    num_samples: Mapping[Client, int]
    keep_ratios: Mapping[Client, float]
    node_keys: Sequence[str] = ()
