"""Training in two stages: clients report the norm of their update, and keep it until the server has selected some."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding import Plan
from sharding.client_sampling import Participation, Sampler
from sharding.rounds.aggregation.faults import NOTHING, find_misfit
from sharding.rounds.norms import update_norm
from sharding.rounds.plan import Client
from train.engines.engine import Engine, Replies, Reply


@dataclass(frozen=True)
class Reports:
    """Reports of clients that keep their updates until the server has selected some.

    Attributes:
        norms: ‖U‖/lr of every client that trained; the division makes norms of different rounds comparable.
        collect: returns the updates of these clients, and the failures of the others.
    """

    norms: Mapping[Client, float]
    collect: Callable[[Collection[Client]], Replies]


class TwoStageEngine(Engine):
    """An engine whose clients themselves keep their updates."""

    @abstractmethod
    def report(self, plan: Plan, round: int, lr: float) -> Reports:
        """Train every client and return the norms; the clients keep their updates until they are collected."""


def train_selected(
    engine: Engine, sampler: Sampler, plan: Plan, round: int, lr: float
) -> tuple[Participation, Replies]:
    """Train a round's clients; return the sampler's selection, and the updates that it needs.

    Most samplers select before the clients train, and their updates arrive one by one. With a sampler that
    `needs_norms`, all clients train first and report.
    """
    cohort = [int(client) for client in plan]
    if not sampler.needs_norms:
        return sampler.select(round, cohort, {}), engine.train(plan, round, lr)
    reports = report(engine, plan, round, lr)
    selection = sampler.select(round, cohort, reports.norms)
    return selection, reports.collect(selection.weights)


def report(engine: Engine, plan: Plan, round: int, lr: float) -> Reports:
    """Train every client of a plan and return the norms; the updates are kept here if the clients do not keep them."""
    if isinstance(engine, TwoStageEngine):
        return engine.report(plan, round, lr)
    kept: dict[Client, Reply] = {}
    norms: dict[Client, Tensor] = {}
    for client, reply in engine.train(plan, round, lr):
        if client in plan and client not in kept:
            shard = plan.shard(client)
            misfit = None if reply.update is None else find_misfit(shard, reply.update)
            kept[client] = reply if misfit is None else Reply(None, None, misfit)
            if reply.update is not None and misfit is None:
                norms[client] = update_norm(shard, reply.update)
    values = (torch.stack([*norms.values()]) / lr).tolist() if norms else []

    def collect(selected: Collection[Client]) -> Replies:
        for client in plan:
            reply = kept.get(client, Reply(None, None, NOTHING))
            if client in selected or reply.failure is not None:
                yield client, reply

    return Reports(dict(zip(norms, values, strict=True)), collect)
