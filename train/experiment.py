"""The parts of a run of one model, and what a round does with them: plan, train, and select the updates that count."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn

from sharding import Plan, Server
from sharding.aggregation.faults import NOTHING, find_misfit
from sharding.client_sampling import Participation, Sampler
from sharding.planner import Client
from sharding.shard import update_norm
from train.config.schema import Config
from train.data import Dataset, Split
from train.engines import Engine, Job, Update
from train.engines.base import Updates
from train.runtime.clock import Clock
from train.runtime.stages import enter

log = logging.getLogger(__name__)

Metrics = dict[str, Any]  # of a round


@dataclass(frozen=True)
class Work:
    """One model's part of a round before its updates are averaged.

    Attributes:
        plan: the shards, by client.
        chosen: the clients that count, and their weights.
        updates: one of each client in the plan, as they arrive.
        further_bytes: downloaded in addition to the shards.
    """

    plan: Plan
    chosen: Participation
    updates: Updates
    further_bytes: int = 0


@dataclass
class Experiment:
    """The parts of a run of one model.

    Attributes:
        training: the samples of all clients.
        server: holds the model, on the device, and runs its rounds.
        keep_ratios: r of every client.
        num_samples: D_c of every client.
        dense_nbytes: what dense FedAvg sends one client, one way.
        node_keys: in a federation, a digest of the public key of each client's node.
        consult: where clients keep their updates until asked, trains a plan and returns the selected clients.
    """

    config: Config
    dataset: Dataset
    training: Split
    server: Server
    keep_ratios: Mapping[Client, float]
    num_samples: Mapping[Client, int]
    dense_nbytes: int
    sampler: Sampler
    job: Job
    make_engine: Callable[[Job], Engine]
    node_keys: Sequence[str] = ()
    consult: Callable[[Sampler, Plan, int, float], tuple[Participation, Updates]] | None = None

    @cached_property
    def engine(self) -> Engine:
        """The engine that trains the cohorts, created on first use because some engines start processes."""
        return self.make_engine(self.job)

    def open(self) -> None:
        """Create the engine now, so that errors appear before anything is written."""
        enter(f"preparing the engine {self.config.engine}")
        assert self.engine

    @property
    def model(self) -> nn.Module:
        """The server's model."""
        return self.server.model

    @property
    def result(self) -> nn.Module:
        """The model that is evaluated."""
        return self.server.result

    @property
    def parts(self) -> Mapping[str, Self]:
        """Itself by its name: `train.multi_model.MultiModel` has several."""
        return {self.config.name: self}

    def close(self) -> None:
        """Release the engine's processes, if there are any."""
        if "engine" in vars(self):
            self.engine.close()

    def step_size(self, t: int) -> float:
        """Return the clients' learning rate in round t."""
        local = self.config.local
        return local.schedule.build(local.optimizer.options["lr"], t, self.config.rounds)

    def plan(self, clients: Sequence[int], t: int, clock: Clock) -> Plan:
        """Plan the shards of these clients for round t."""
        with clock("plan"):
            return self.server.plan({client: self.keep_ratios[client] for client in clients}, t)

    def train(self, plan: Plan, t: int) -> Updates:
        """Train a plan; yield one update of each client."""
        return fitting(plan, self.engine.train(plan, t, self.step_size(t)))

    def begin(self, cohort: list[int], t: int, clock: Clock) -> dict[str, Work]:
        """Plan and train the cohort, and select the clients that count.

        If the sampler needs the norms of the updates, all updates are kept until it has selected.
        """
        plan = self.plan(cohort, t, clock)
        with clock("train"):
            return {self.config.name: self._select(plan, cohort, t)}

    def _select(self, plan: Plan, cohort: list[int], t: int) -> Work:
        if self.sampler.uploads_later and self.consult is not None:
            heard, sent = self.consult(self.sampler, plan, t, self.step_size(t))
            return Work(plan, heard, fitting(plan, sent))
        updates = self.train(plan, t)
        if not self.sampler.needs_norms:
            return Work(plan, self.sampler.select(t, cohort, {}), updates)
        kept = dict(updates)
        norms = reported_norms(plan, kept, self.step_size(t))
        return Work(plan, self.sampler.select(t, cohort, norms), iter(kept.items()))

    def summarize(self, found: Mapping[str, Metrics], num_clients: int) -> Metrics:
        """Return the metrics of a round: those of its one model."""
        return found[self.config.name]


def fitting(plan: Plan, updates: Updates) -> Updates:
    """Yield the first update of every client of the plan, or a failure if it is missing or does not fit the plan."""
    seen: set[Client] = set()
    for client, update in updates:
        if client not in plan or client in seen:
            log.warning("ignored a duplicate or unrequested update from client %s", client)
            continue
        seen.add(client)
        misfit = None if update.shard is None else find_misfit(plan[client], update.shard)
        yield client, update if misfit is None else Update(None, None, misfit)
    yield from ((client, Update(None, None, NOTHING)) for client in plan if client not in seen)


def reported_norms(plan: Plan, updates: Mapping[Client, Update], lr: float) -> dict[Client, float]:
    """Return ‖U‖/lr of every client that trained; the division makes norms of different rounds comparable."""
    norms = {client: update_norm(plan[client], shard) for client in plan if (shard := updates[client].shard)}
    return dict(zip(norms, (torch.stack(list(norms.values())) / lr).tolist(), strict=True)) if norms else {}
