"""The metrics of a round: losses, accuracies, bytes, seconds, and the clients left out, with reasons.

With privacy, metrics are functions of what is released and of what is public: who took part, what became of single
clients, and what a round took are secrets. In their place there are expected numbers.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from sharding.client_sampling import Participation
from sharding.client_sampling.network import Profiles
from sharding.rounds.aggregation.aggregate import Outcome
from sharding.rounds.diagnostics import plan_anme, plan_coverage, plan_discrepancy
from sharding.rounds.failures import Kind
from sharding.rounds.plan import Client, Plan
from train.experiment.experiment import Experiment

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoundMetrics:
    """One round's metrics, a line of `metrics.jsonl`. Shares are in 0…1, bytes are sums over the cohort.

    ``metrics | values`` are the same metrics with more values.

    Where a run trains several models, these are sums of bytes and counts and means of losses and accuracies, and
    `extra` has each model's metrics as ``<model>/<metric>``.

    Attributes:
        round: t, from 0.
        num_clients: the number of invited clients; with privacy, expected.
        num_aggregated: the number of clients whose update was averaged in; None with privacy, as what follows.
        num_failed: the number of clients whose update could not be used.
        failed_by_kind: counts of failures by kind.
        failures: the reason by client.
        new_clients: the clients that received the residual in this round, where something is frozen.
        bytes_down: the bytes of all shards that were sent, and of `new_clients`' residual; with privacy, expected.
        bytes_up: the bytes of all updates and reports; with privacy, expected.
        bytes_dense: the bytes that dense FedAvg sends one client, one way.
        bytes_total: the bytes down and up, of this round and all before.
        lr: the clients' learning rate.
        train_loss: the clients' mean loss, weighted by their samples.
        anme: evenness of the inclusion probabilities, mean over layers.
        discrepancy: the discrepancy of the clients' average, mean over layers.
        discrepancy_client: the discrepancy of one client's model.
        coverage: the share of all terms that some client held.
        alignment: cosine between the server's step and FedAvg's.
        test_accuracy: the accuracy on the test set, or on held-out samples if there are any.
        test_loss: the loss on the same samples.
        train_set_accuracy: the accuracy on all clients' samples.
        train_set_loss: the loss on all clients' samples.
        best_accuracy: the best test accuracy of this round and all before.
        seconds: the seconds of the round on this machine.
        seconds_plan: the seconds of planning.
        seconds_train: the seconds of training, with the transport of updates.
        seconds_aggregate: the seconds of the server's step.
        seconds_evaluate: the seconds of evaluation.
        simulated_seconds: the seconds of the round on the configured network.
        epsilon: with privacy, ε at the configured δ of all rounds that the run may release.
        stopped: why the run ends early with this round.
        is_lost: whether clients failed and no update could be used. It is not written.
        extra: the sampler's measurements, and the metrics of each of several models.
    """

    round: int
    num_clients: int
    num_aggregated: int | None = None
    num_failed: int | None = None
    failed_by_kind: dict[str, int] | None = None
    failures: dict[str, str] | None = None
    new_clients: list[Client] | None = None
    bytes_down: int
    bytes_up: int
    bytes_dense: int
    bytes_total: int = 0
    lr: float | None = None
    train_loss: float | None = None
    anme: float | None = None
    discrepancy: float | None = None
    discrepancy_client: float | None = None
    coverage: float | None = None
    alignment: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    train_set_accuracy: float | None = None
    train_set_loss: float | None = None
    best_accuracy: float | None = None
    seconds: float | None = None
    seconds_plan: float | None = None
    seconds_train: float | None = None
    seconds_aggregate: float | None = None
    seconds_evaluate: float | None = None
    simulated_seconds: float | None = None
    epsilon: float | None = None
    stopped: str | None = None
    is_lost: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_lost", self.is_lost or (bool(self.num_failed) and not self.num_aggregated))

    def __or__(self, values: Mapping[str, Any]) -> Self:
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """Return all metrics by name; those that were not measured in this round are left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("extra", "is_lost")}
        return {name: value for name, value in values.items() if value is not None} | self.extra

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Self:
        """Return the metrics of a line of `metrics.jsonl`; raise a TypeError if one that every round has is missing."""
        names = {entry.name for entry in fields(cls)}
        values = {name: value for name, value in line.items() if name in names}
        return cls(**values, extra={name: value for name, value in line.items() if name not in names})


def measure(
    experiment: Experiment,
    t: int,
    plan: Plan,
    selection: Participation,
    outcome: Outcome,
    losses: Mapping[Client, Tensor],
) -> RoundMetrics:
    """Return the metrics that follow from a round's plan and updates.

    Clients of the selection were to upload, those of the outcome were averaged in, and those with a loss reported it.
    """
    reasons = dict(selection.rejected) | outcome.rejected
    failures = {client: reasons[client] for client in plan if client in reasons}
    if experiment.server.privacy is not None:
        for client, failure in failures.items():
            log.warning("client %s is left out of round %d: %s", client, t, failure.message)
        down, up = experiment.expected_bytes(t)
        return RoundMetrics(
            round=t,
            num_clients=experiment.config.clients.per_round,
            bytes_down=down,
            bytes_up=up,
            bytes_dense=experiment.dense_nbytes,
            lr=experiment.lr(t),
            anme=plan_anme(plan),
            is_lost=bool(failures) and not outcome.accepted,
        )
    num_samples, profiles = experiment.clients.num_samples, experiment.sampler.population.profiles
    accepted = [client for client in outcome.accepted if client in losses]
    samples = sum(num_samples[client] for client in accepted)
    values = torch.stack([losses[client] for client in accepted]).tolist() if accepted else []  # in one transfer
    loss = sum(value * num_samples[client] for client, value in zip(accepted, values, strict=True))
    absent = {client for client, failure in failures.items() if failure.kind == Kind.ABSENT}
    new = []
    if experiment.residual_nbytes:
        new = [client for client in plan if client not in absent and client not in experiment.with_residual]
    collective, single = plan_discrepancy(plan)
    uploads = sum(plan.update_nbytes(client) for client in outcome.received if client in selection.weights)
    return RoundMetrics(
        round=t,
        num_clients=len(plan),
        num_aggregated=len(outcome.accepted),
        num_failed=len(failures),
        failed_by_kind=dict(Counter(str(failure.kind) for failure in failures.values()).most_common()),
        failures={str(client): failure.message for client, failure in failures.items()},
        new_clients=new or None,
        bytes_down=(
            selection.download_bytes
            + plan.nbytes
            - sum(plan.template(client).nbytes for client in absent)
            + experiment.residual_nbytes * len(new)
        ),
        bytes_up=selection.report_bytes + uploads,
        bytes_dense=experiment.dense_nbytes,
        lr=experiment.lr(t),
        train_loss=loss / samples if accepted else None,
        anme=plan_anme(plan),
        discrepancy=collective,
        discrepancy_client=single,
        coverage=plan_coverage(plan),
        simulated_seconds=None if profiles is None else simulated_time(profiles, plan, selection),
        extra=dict(selection.metrics),
    )


def simulated_time(profiles: Profiles, plan: Plan, selection: Participation) -> float:
    """Return the seconds that the round takes on the simulated network."""
    cohort, senders = [int(client) for client in plan], [int(client) for client in selection.weights]
    if len(senders) < len(cohort):
        return profiles.round_time(cohort, senders)
    return profiles.round_time([int(client) for client in plan for _ in range(selection.draws.get(client, 1))])
