"""The reference engine: one client after the other, on one resident model per shard size.

Shards are copied into the resident model, so memory does not grow with the number of clients.
"""

import logging
from copy import deepcopy

from torch import nn

from sharding import Plan, Shard, factorize
from sharding.planner import Client
from train.engines.base import Job, Update, Updates
from train.layout import keep_layout
from train.local import train_locally

log = logging.getLogger(__name__)


class SequentialEngine:
    """Trains the clients one by one, in the order of the plan."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._template = keep_layout(deepcopy(job.model))
        self._residents: dict[float | None, nn.Module] = {}

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates."""
        ratios = {client: ratio for ratio, clients in plan.groups.items() for client in clients}
        for client, shard in plan.items():
            yield client, self.train_client(client, shard, ratios[client], round, lr)

    def train_client(self, client: Client, shard: Shard, ratio: float, round: int, lr: float) -> Update:
        """Train one client on a shard of this keep ratio."""
        job = self.job
        try:
            model = self.resident(ratio if shard.terms else None)
            shard.load_into(model)
            key = (job.seed, round, client)
            loss = train_locally(model, job.clients[client], job.dataset, job.local, lr, job.clip, key)
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

    def resident(self, ratio: float | None) -> nn.Module:
        """Return the model that shards of this keep ratio are trained in; None stands for the dense one."""
        if ratio not in self._residents:
            self._residents[ratio] = self._template if ratio is None else factorize(self._template, ratio)
        return self._residents[ratio]

    def close(self) -> None:
        """Nothing to do."""
