"""Participation in a round: plan the cohort's shards, train, and select the updates that count."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sharding.aggregation.faults import NOTHING, find_misfit
from sharding.client_sampling import Participation
from sharding.planner import Client, Plan
from sharding.shard import update_norm
from train.config.registries import SCHEDULES
from train.config.schema import Config
from train.engines import Update
from train.engines.base import Updates
from train.experiment import Experiment
from train.runtime.clock import Clock

log = logging.getLogger(__name__)


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


def select(experiment: Experiment, cohort: list[int], t: int, clock: Clock) -> Work:
    """Plan and train the cohort, and select the clients that count.

    If the sampler needs the norms of the updates, all updates are kept until it has selected.
    """
    sampler, engine, lr = experiment.sampler, experiment.engine, step_size(experiment.config, t)
    plan = plan_shards(experiment, cohort, t, clock)
    with clock("train"):
        if sampler.uploads_later and experiment.consult is not None:
            heard, sent = experiment.consult(sampler, plan, t, lr)
            return Work(plan, heard, fitting(plan, sent))
        updates = fitting(plan, engine.train(plan, t, lr))
        if not sampler.needs_norms:
            return Work(plan, sampler.select(t, cohort, {}), updates)
        kept = dict(updates)
        return Work(plan, sampler.select(t, cohort, reported_norms(plan, kept, lr)), iter(kept.items()))


def plan_shards(experiment: Experiment, clients: Sequence[int], t: int, clock: Clock) -> Plan:
    """Plan the shards of these clients for round t."""
    with clock("plan"):
        return experiment.server.plan({client: experiment.keep_ratios[client] for client in clients}, t)


def step_size(config: Config, t: int) -> float:
    """Return the clients' learning rate in round t."""
    return SCHEDULES[config.local.schedule](config.local.lr, t, config.rounds)


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
