"""The reference engine: one client after the other, on one resident model per shard size.

Shards are copied into the resident model, so memory does not grow with the number of clients.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy

from torch import nn

from sharding import Plan, Shard, factorize
from sharding.planner import Client
from train.config import LocalConfig
from train.data import Dataset
from train.engines.base import Update
from train.local import ClientData, train_locally

log = logging.getLogger(__name__)


class SequentialEngine:
    """Trains the clients one by one.

    Args:
        model: the server's model, for its architecture only.
        clients: each client's samples, on the device.
        dataset: says how to prepare and augment them.
        local: epochs, batch size and so on.
        clip: τ, or None for no clipping.
        seed: of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Mapping[Client, ClientData],
        dataset: Dataset,
        local: LocalConfig,
        clip: float | None,
        seed: int,
    ) -> None:
        self._template = deepcopy(model)
        self._residents: dict[float | None, nn.Module] = {}
        self._clients = clients
        self._dataset = dataset
        self._local = local
        self._clip = clip
        self._seed = seed

    def train(self, plan: Plan, round: int, lr: float) -> dict[Client, Update]:
        """Train every client of the plan, in its order."""
        return {
            client: self._train_client(client, plan[client], ratio, round, lr)
            for ratio, clients in plan.groups.items()
            for client in clients
        }

    def _train_client(self, client: Client, shard: Shard, ratio: float, round: int, lr: float) -> Update:
        try:
            model = self._resident(ratio if shard.terms else None)
            shard.load_into(model)
            key = (self._seed, round, client)
            loss = train_locally(model, self._clients[client], self._dataset, self._local, lr, self._clip, key)
            return Update(shard.read_from(model), loss)
        except Exception as error:  # a client's failure never stops a round
            log.warning(
                "client %s failed in round %d: %s",
                client,
                round,
                error,
                exc_info=log.isEnabledFor(logging.DEBUG),
            )
            return Update(None, None, f"{type(error).__name__}: {error}")

    def _resident(self, ratio: float | None) -> nn.Module:
        """Return the model that shards of this keep ratio are trained in; None stands for the dense one."""
        if ratio not in self._residents:
            self._residents[ratio] = self._template if ratio is None else factorize(self._template, ratio)
        return self._residents[ratio]
