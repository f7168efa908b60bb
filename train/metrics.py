"""The metrics of a round other than its time: losses, accuracies, bytes, and the clients left out, with reasons."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from sharding import Server, ShardPlanner
from sharding.aggregation.aggregate import Aggregation
from sharding.client_sampling import Participation
from sharding.diagnostics import alignment, plan_anme, plan_coverage, plan_discrepancy
from sharding.failures import Kind
from sharding.planner import Client, Plan
from train.engines import Receipt
from train.engines.local import evaluate
from train.experiment import Experiment, Metrics, Work


def measure(experiment: Experiment, work: Work, receipts: Mapping[Client, Receipt], outcome: Aggregation) -> Metrics:
    """Return the metrics of a round except its accuracy; bytes are sums over the cohort."""
    plan, heard, accepted = work.plan, work.chosen, outcome.accepted
    losses = {client: float(loss) for client in accepted if (loss := receipts[client].loss) is not None}
    weights = {client: experiment.num_samples[client] for client in losses}
    reasons = dict(heard.rejected) | outcome.rejected
    failures = {c: receipts[c].failure or reasons[c] for c in plan if c in reasons or receipts[c].failure}
    absent = [client for client in plan if (why := receipts[client].failure) and why.kind == Kind.ABSENT]
    collective, single = plan_discrepancy(plan)
    return {
        "train_loss": sum(losses[c] * weights[c] for c in losses) / sum(weights.values()) if losses else None,
        "anme": plan_anme(plan),
        "discrepancy": collective,
        "discrepancy_client": single,
        "coverage": plan_coverage(plan),
        "bytes_down": work.further_bytes + plan.nbytes - sum(plan[client].nbytes for client in absent),
        "bytes_up": heard.report_bytes + sum(receipts[client].nbytes for client in heard.weights),
        "bytes_dense": experiment.dense_nbytes,
        "clients": len(plan),
        "heard": len(accepted),
        "failed": len(failures),
        "failed_by_kind": dict(Counter(str(why.kind) for why in failures.values()).most_common()),
        "failures": {str(client): why.message for client, why in failures.items()},
        **heard.metrics,
        **simulated_time(experiment, plan, heard),
    }


def simulated_time(experiment: Experiment, plan: Plan, heard: Participation) -> Metrics:
    """Return the simulated time of the round, if a network is configured."""
    profiles = experiment.sampler.population.profiles
    if profiles is None:
        return {}
    cohort, senders = [int(client) for client in plan], [int(client) for client in heard.weights]
    if len(senders) < len(cohort):
        return {"simulated_seconds": profiles.round_time(cohort, senders)}
    draws = [int(client) for client in plan for _ in range(heard.draws.get(client, 1))]
    return {"simulated_seconds": profiles.round_time(draws)}


def scores(experiment: Experiment) -> Metrics:
    """Return accuracy and loss on the test split and, with `evaluate_training`, on all clients' samples."""
    model, dataset = experiment.result, experiment.dataset
    accuracy, loss = evaluate(model, dataset, dataset.test)
    metrics: Metrics = {"test_accuracy": accuracy, "test_loss": loss}
    if experiment.config.evaluate_training:
        accuracy, loss = evaluate(model, dataset, experiment.training)
        metrics |= {"train_set_accuracy": accuracy, "train_set_loss": loss}
    return metrics


class FedAvgStep:
    """FedAvg's update of the server's model in this round; the model itself is not changed.

    For it, the cohort also trains the whole model on the batches that it trains its shards on. It is measured and
    discarded, which about doubles the cost of a round.
    """

    def __init__(self, experiment: Experiment, cohort: Sequence[Client], round: int) -> None:
        twin = Server(deepcopy(experiment.model), ShardPlanner("dense"))
        plan = twin.plan(dict.fromkeys(cohort, 1.0), round)
        updates = experiment.engine.train(plan, round, experiment.step_size(round))
        twin.aggregate(plan, ((client, update.shard) for client, update in updates), experiment.num_samples)
        self._before = flatten(experiment.model)
        self._update = flatten(twin.model) - self._before

    def cosine(self, model: nn.Module) -> float:
        """Return the cosine between this update and the one that made `model`; NaN if either is zero."""
        return alignment(flatten(model) - self._before, self._update)


@torch.no_grad()
def flatten(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
