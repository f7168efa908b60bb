"""The algorithm: invite, plan, train, hear, aggregate, evaluate, record."""

import logging
from collections.abc import Callable, Mapping

import torch

from sharding import plan_anme, plan_coverage, plan_discrepancy
from sharding.aggregate import Aggregation, Average
from sharding.clients import Heard
from sharding.faults import NOTHING, find_misfit
from sharding.planner import Client, Plan
from sharding.shard import update_norm
from train.alignment import FedAvgStep
from train.clock import Clock
from train.config import Config
from train.engines import Receipt, Update
from train.engines.base import Consulting, Updates
from train.experiment import Experiment
from train.failures import RunError
from train.local import evaluate
from train.parts import SCHEDULES
from train.reasons import count_kinds

log = logging.getLogger(__name__)

Metrics = dict[str, object]
MOST_LOST = 5  # rounds in a row without any usable update, after which a run ends


def run_rounds(experiment: Experiment, start: int, record: Callable[[int, Metrics], bool]) -> None:
    """Run the rounds `start` … `config.rounds` − 1, each one's metrics handed to `record`, until that returns true."""
    config, model, server = experiment.config, experiment.model, experiment.server
    guards, losses = config.aggregation, LostRounds(config.rounds)
    for t in range(start, config.rounds):
        clock = Clock()
        cohort = experiment.sampler.cohort(t)
        with clock("plan"):
            plan = experiment.plan(cohort, t)
        lr = step_size(config, t)
        looks = config.evaluates(t)
        fedavg = FedAvgStep(experiment, cohort, t, lr) if config.alignment and looks else None
        with clock("train"):
            heard, updates = hear(experiment, cohort, plan, t, lr)
            average, receipts = Average(plan, heard.weights, guards.norm_bound, guards.trim), {}
            for client, update in updates:
                average.add(client, update.shard)
                receipts[client] = Receipt.of(update)
        with clock("aggregate"):
            outcome = average.write_to(model, heard.total, server.rate)
            experiment.step()
        metrics = measure(experiment, plan, receipts, heard, outcome)
        if fedavg is not None:
            metrics["alignment"] = fedavg.cosine(model)
        if looks:
            with clock("evaluate"):
                metrics |= scores(experiment)
        done = record(t, {"round": t, "lr": lr} | metrics | clock.seconds())
        losses.count(metrics)
        if done:
            return


def scores(experiment: Experiment) -> Metrics:
    """Return how a run's model does on the test split and, if that is asked for, on all clients' samples."""
    model, dataset = experiment.result, experiment.dataset
    accuracy, loss = evaluate(model, dataset, dataset.test)
    metrics: Metrics = {"test_accuracy": accuracy, "test_loss": loss}
    if experiment.config.evaluate_training:
        accuracy, loss = evaluate(model, dataset, experiment.training)
        metrics |= {"train_set_accuracy": accuracy, "train_set_loss": loss}
    return metrics


def step_size(config: Config, t: int) -> float:
    """Return the clients' learning rate in round t."""
    return SCHEDULES[config.local.schedule](config.local.lr, t, config.rounds)


class DivergedError(RunError):
    """No client's update could be used for too long: going on would train nothing."""


class LostRounds:
    """Counts the rounds in a row in which all that was heard had to be left out.

    Args:
        rounds: of the run; a shorter one ends when all of its rounds were lost.
    """

    def __init__(self, rounds: int) -> None:
        self._limit, self._lost = min(MOST_LOST, rounds), 0

    def count(self, metrics: Metrics) -> None:
        """Take a round's metrics in.

        Raises:
            DivergedError: it was one too many.
        """
        self._lost = self._lost + 1 if metrics["failed"] and not metrics["heard"] else 0
        if self._lost == self._limit:
            raise DivergedError(
                f"no client's update could be used in {self._lost} rounds in a row; metrics.jsonl says why, under "
                "failures. Where the training diverged, lower local.lr, server_lr or clip, and run it again"
            )


def hear(experiment: Experiment, cohort: list[int], plan: Plan, t: int, lr: float) -> tuple[Heard, Updates]:
    """Train the cohort, and return who of them is heard; where that depends on their updates, all are kept first."""
    sampler, engine = experiment.sampler, experiment.engine
    if sampler.has_budget and isinstance(engine, Consulting):
        heard, sent = engine.consult(sampler, plan, t, lr)
        return heard, fitting(plan, sent)
    updates = fitting(plan, engine.train(plan, t, lr))
    if not sampler.asks:
        return sampler.hear(t, cohort, {}), updates
    kept = dict(updates)
    return sampler.hear(t, cohort, reported_norms(plan, kept, lr)), iter(kept.items())


def fitting(plan: Plan, updates: Updates) -> Updates:
    """Yield one update of every client, its first; in the place of one that does not fit the plan comes why not."""
    seen: set[Client] = set()
    for client, update in updates:
        if client not in plan or client in seen:
            log.warning("an update of client %s is left out: it is its second, or nobody asked for it", client)
            continue
        seen.add(client)
        misfit = None if update.shard is None else find_misfit(plan[client], update.shard)
        yield client, update if misfit is None else Update(None, None, misfit)
    yield from ((client, Update(None, None, NOTHING)) for client in plan if client not in seen)


def reported_norms(plan: Plan, updates: Mapping[Client, Update], lr: float) -> dict[Client, float]:
    """Return ‖U‖/lr of every client that trained: by the round's step size, norms of different rounds compare."""
    norms = {client: update_norm(plan[client], shard) for client in plan if (shard := updates[client].shard)}
    return dict(zip(norms, (torch.stack(list(norms.values())) / lr).tolist(), strict=True)) if norms else {}


def measure(
    experiment: Experiment, plan: Plan, receipts: Mapping[Client, Receipt], heard: Heard, outcome: Aggregation
) -> Metrics:
    """Return what a round tells besides its accuracy; bytes are sums over the cohort."""
    accepted = outcome.accepted
    losses = {client: float(loss) for client in accepted if (loss := receipts[client].loss) is not None}
    weights = {client: experiment.num_samples[client] for client in losses}
    reasons = dict(heard.rejected) | outcome.rejected
    failures = {c: receipts[c].failure or reasons[c] for c in plan if c in reasons or receipts[c].failure}
    collective, single = plan_discrepancy(plan)
    return {
        "train_loss": sum(losses[c] * weights[c] for c in losses) / sum(weights.values()) if losses else None,
        "anme": plan_anme(plan),
        "discrepancy": collective,
        "discrepancy_client": single,
        "coverage": plan_coverage(plan),
        "bytes_down": sum(shard.nbytes for shard in plan.values()),
        "bytes_up": heard.report_bytes + sum(receipts[client].nbytes for client in heard.weights),
        "bytes_dense": experiment.dense_nbytes,
        "clients": len(plan),
        "heard": len(accepted),
        "failed": len(failures),
        "failed_by_kind": count_kinds(failures.values()),
        "failures": {str(client): reason for client, reason in failures.items()},
        **heard.metrics,
        **simulated_time(experiment, plan, heard),
    }


def simulated_time(experiment: Experiment, plan: Plan, heard: Heard) -> Metrics:
    """Return what the round would have taken on the clients' network, where that is configured."""
    profiles = experiment.sampler.population.profiles
    if profiles is None:
        return {}
    cohort, senders = [int(client) for client in plan], [int(client) for client in heard.weights]
    if len(senders) < len(cohort):
        return {"simulated_seconds": profiles.round_time(cohort, senders)}
    draws = [int(client) for client in plan for _ in range(heard.draws.get(client, 1))]
    return {"simulated_seconds": profiles.round_time(draws)}
