"""Rounds of a method of federated fine-tuning, with the data, cohorts, batches and clients of a configured run.

The clients train on the residual's values in float32, which are those of its stored format: they need not be computed
in each step. Bytes and memory are those of the stored format.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Self

import pandas as pd
import torch
from torch import nn

from sharding import Frozen, Update
from sharding.matrices.quantization import dequantize
from sharding.rounds.aggregation.faults import find_spoiled
from sharding.rounds.plan import Client
from studies.curves import evaluations
from studies.peers.servers import MethodServer
from studies.runner import run_one_by_one
from train.cli.client_memory import client_memory
from train.config.schema import Config
from train.engines.sequential import SequentialEngine
from train.experiment.assembly import assemble, make_model
from train.experiment.experiment import Experiment

EXTRA = (  # of a curve, beside the columns of all studies
    "bytes_first",  # of the residuals that clients received on first contact
    "memory_least",  # bytes of a client with the smallest keep ratio while it trains
    "memory_most",  # with the largest
)
MakeServer = Callable[[Config, nn.Module, nn.Module], MethodServer]  # of a run, its first model, and the dense one


@dataclass
class Federation:
    """A method's server and the clients.

    Attributes:
        experiment: data, keep ratios, sampler and step sizes.
        server: the method's.
        last: the last round of each client that took part.
        bytes_first: that clients received on first contact so far.
        client_bytes: of a client with the smallest and one with the largest keep ratio while it trains.
    """

    experiment: Experiment
    server: MethodServer
    last: dict[Client, int] = field(default_factory=dict)
    bytes_first: int = 0
    client_bytes: Mapping[str, int] = field(default_factory=dict)
    _engine: tuple[str, SequentialEngine] | None = None

    @classmethod
    def of(cls, config: Config, make: MakeServer) -> Self:
        """Build the start of a run."""
        experiment = assemble(config)
        federation = cls(experiment, make(config, experiment.model, make_model(config, experiment.dataset)))
        ratios = experiment.keep_ratios.values()
        federation.client_bytes = {
            "memory_least": federation.memory(min(ratios)),
            "memory_most": federation.memory(max(ratios)),
        }
        return federation

    @property
    def model(self) -> nn.Module:
        """The server's model."""
        return self.server.model

    def train_round(self, t: int) -> dict[str, Any]:
        """Train round `t` and return its metrics."""
        experiment, server = self.experiment, self.server
        ratios: dict[Client, float] = {
            client: experiment.keep_ratios[client] for client in experiment.sampler.cohort(t)
        }
        updates, losses = dict[Client, Update](), list[float]()
        shards = server.shards(ratios, t)
        engine = self._engine_of(server.frozen)
        down = first = server.first_nbytes * len(ratios.keys() - self.last.keys())
        for client, shard in shards:
            down += server.sent_nbytes(shard, self.last.get(client), t)
            self.last[client] = t
            reply = engine.train_client(
                client, replace(shard, frozen_digest=engine.job.frozen.digest), t, experiment.lr(t)
            )
            if reply.update is not None and reply.loss is not None and find_spoiled(reply.update) is None:
                updates[client] = replace(reply.update, frozen_digest=shard.frozen_digest)
                losses.append(float(reply.loss))
        server.step(updates, experiment.num_samples)
        up = sum(update.nbytes for update in updates.values())
        line = {"round": t, "train_loss": fmean(losses) if losses else None}
        line |= {"bytes_down": down, "bytes_up": up, "num_clients": len(ratios), "num_aggregated": len(updates)}
        self.bytes_first += first
        return {**line, "bytes_first": self.bytes_first, **self.client_bytes}

    def memory(self, ratio: float) -> int:
        """Return the bytes of a client's tensors while it trains, with frozen weights as they are stored."""
        experiment, server = self.experiment, self.server
        of_run = max(experiment.keep_ratios.values()), experiment.dataset, experiment.config.local
        parts = client_memory(server.planner, server.model, ratio, *of_run)
        stored = (*server.stored.residuals.values(), *server.stored.parameters.values())
        return parts.total - parts.frozen + sum(part.nbytes for part in stored)

    def _engine_of(self, frozen: Frozen) -> SequentialEngine:
        """Return what trains clients on this residual."""
        if self._engine is None or self._engine[0] != frozen.digest:
            structure = dict(self.server.structure.named_parameters())
            columns = {name: structure[f"{name}.weight"][0].numel() for name in frozen.residuals}
            layers = {
                name: dequantize(stored, columns[name], torch.float32) for name, stored in frozen.residuals.items()
            }
            job = replace(self.experiment.job, model=self.server.structure, frozen=Frozen(layers, frozen.parameters))
            self._engine = frozen.digest, SequentialEngine(job)
        return self._engine[1]


def run_all(make: MakeServer, configs: Mapping[str, Config], *_: object) -> pd.DataFrame:
    """Run what is missing, one run at a time, and return the curves of all runs with their clients' memory."""
    rounds = run_one_by_one(configs, lambda config: Federation.of(config, make))
    return evaluations(rounds).merge(rounds[["run", "rounds", *EXTRA]], on=["run", "rounds"])
