"""Several models trained at once by the same clients, each of which sends at most one update a round (MMFL).

A round is the round of train/rounds.py with one question more, for which model a client is heard: invite, ask, assign,
and for each model plan, train, aggregate, evaluate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from sharding import Plan, aggregate
from sharding.clients import Heard, TaskSampler
from sharding.clients.optimal import REPORT_BYTES
from sharding.errors import UserError
from sharding.planner import Client
from sharding.shard import Shard
from train.clock import Clock
from train.config import Config
from train.engines import Receipt, Update
from train.experiment import Experiment, assemble, make_sampler
from train.local import evaluate
from train.rounds import LostRounds, Metrics, fitting, measure, reported_norms, step_size

SUMS = ("bytes_down", "bytes_up", "bytes_dense", "heard", "failed")


@dataclass
class Tasks:
    """The parts of a run of several models.

    Attributes:
        experiments: by the task's name; their own samplers are not used.
        model: all models, to be saved and loaded together.
    """

    config: Config
    experiments: Mapping[str, Experiment]
    sampler: TaskSampler
    model: nn.ModuleDict

    @property
    def result(self) -> nn.ModuleDict:
        """The models that are evaluated."""
        return nn.ModuleDict({name: experiment.result for name, experiment in self.experiments.items()})

    @property
    def parts(self) -> Mapping[str, Experiment]:
        """The experiments by name."""
        return self.experiments

    def close(self) -> None:
        """Let go of what the engines hold besides memory."""
        for experiment in self.experiments.values():
            experiment.close()


@dataclass(frozen=True)
class Work:
    """What the clients did for one model in one round."""

    plan: Plan
    updates: Mapping[Client, Update]


def assemble_tasks(config: Config) -> Tasks:
    """Build everything a run of several models needs; writes nothing.

    Raises:
        UserError: as `train.experiment.assemble`; the tasks' clients differ in number; or torchrun started this
            process.
    """
    if dist.is_torchelastic_launched():
        raise UserError("tasks={…} are trained by one process; start it without torchrun")
    experiments = {name: assemble(task) for name, task in config.task_configs().items()}
    first = next(iter(experiments.values()))
    counts = {name: len(experiment.num_samples) for name, experiment in experiments.items()}
    if len(set(counts.values())) > 1:
        raise UserError(f"the tasks have different numbers of clients, {counts}; share each out among equally many")
    sampler = make_sampler(config, first.num_samples, dict.fromkeys(first.num_samples, 1.0))
    assert isinstance(sampler, TaskSampler)
    model = nn.ModuleDict({name: experiment.model for name, experiment in experiments.items()})
    return Tasks(config, experiments, sampler, model)


def run_tasks(tasks: Tasks, start: int, record: Callable[[int, Metrics], bool]) -> None:
    """Run the rounds `start` … `config.rounds` − 1, each one's metrics handed to `record`, until that returns true."""
    config, sampler, losses = tasks.config, tasks.sampler, LostRounds(tasks.config.rounds)
    for t in range(start, config.rounds):
        clock = Clock()
        cohort = sampler.cohort(t)
        with clock("train"):
            signals, work = ask(tasks, cohort, t)
            probabilities = sampler.probabilities(t, signals)
            parts = sampler.assign(t, cohort, probabilities)
            for (name, experiment), part in zip(tasks.experiments.items(), parts, strict=True):
                if not sampler.needs_norms:
                    work[name] = train(experiment, list(part), t)
        metrics: Metrics = {}
        with clock("aggregate"):
            for (name, experiment), part in zip(tasks.experiments.items(), parts, strict=True):
                finished = finish(experiment, work[name], cohort, part, sampler.signal or "norm")
                metrics |= {f"{name}/{key}": value for key, value in finished.items()}
        if config.evaluates(t):
            with clock("evaluate"):
                for name, experiment in tasks.experiments.items():
                    metrics[f"{name}/test_accuracy"], metrics[f"{name}/test_loss"] = evaluate(
                        experiment.result, experiment.dataset, experiment.dataset.test
                    )
        metrics = summarize(metrics, list(tasks.experiments))
        done = record(t, {"round": t, "clients": len(cohort)} | metrics | clock.seconds())
        losses.count(metrics)
        if done:
            return


def ask(tasks: Tasks, cohort: list[int], t: int) -> tuple[NDArray[np.float64], dict[str, Work]]:
    """Return the cohort's signals (n, S), and what was trained for them: all by everybody, or nothing yet."""
    work = {name: train(e, cohort, t) for name, e in tasks.experiments.items()} if tasks.sampler.needs_norms else {}
    signals = np.zeros((len(cohort), len(tasks.experiments)))
    for s, (name, experiment) in enumerate(tasks.experiments.items()):
        sizes = np.array([experiment.num_samples[client] for client in cohort], dtype=np.float64)
        if work:
            norms = reported_norms(work[name].plan, work[name].updates, step_size(experiment.config, t))
            signals[:, s] = [norms.get(client, 0.0) for client in cohort]  # who could not train sends nothing
        elif tasks.sampler.signal == "loss":
            signals[:, s] = local_losses(experiment, cohort)
        signals[:, s] *= sizes / sizes.sum()
    return signals, work


def train(experiment: Experiment, clients: list[int], t: int) -> Work:
    """Train the clients on one model."""
    plan = experiment.plan(clients, t)
    return Work(plan, dict(fitting(plan, experiment.engine.train(plan, t, step_size(experiment.config, t)))))


@torch.no_grad()
def local_losses(experiment: Experiment, cohort: list[int], batch_size: int = 512) -> NDArray[np.float64]:
    """Return the mean loss of the server's model on each client's own data, (n,), in few large batches."""
    model, dataset = experiment.model.eval(), experiment.dataset
    data = [experiment.job.clients[client] for client in cohort]
    inputs, targets = torch.cat([part.inputs for part in data]), torch.cat([part.targets for part in data])
    owners = torch.repeat_interleave(torch.arange(len(data)), torch.tensor([len(part) for part in data]))
    sums = torch.zeros(2, len(data), dtype=torch.float64, device=targets.device)  # of losses, and of targets
    owners = owners.to(targets.device)
    for batch, wanted, owner in zip(*(x.split(batch_size) for x in (inputs, targets, owners)), strict=True):
        logits = model(dataset.prepare(batch)).movedim(-1, 1)
        losses = F.cross_entropy(logits, wanted, ignore_index=dataset.ignore_index, reduction="none")
        for row, values in zip(sums, (losses, wanted != dataset.ignore_index), strict=True):
            row.index_add_(0, owner, values.double().flatten(1).sum(1) if values.dim() > 1 else values.double())
    return np.asarray((sums[0] / sums[1]).cpu().numpy())


def finish(experiment: Experiment, work: Work, cohort: list[int], part: Mapping[int, float], signal: str) -> Metrics:
    """Aggregate what the assigned clients send, d_is/p_{s|i} each, and return the task's metrics."""
    samples, config = experiment.num_samples, experiment.config
    total = float(sum(samples[client] for client in cohort))
    weights: dict[Client, float] = {client: samples[client] * weight for client, weight in part.items()}
    heard = Heard(weights, total, report_bytes=REPORT_BYTES * len(cohort) * (signal in ("norm", "loss")))
    uploads: dict[Client, Shard | None] = {client: work.updates[client].shard for client in weights}
    guards = config.aggregation
    outcome = aggregate(
        experiment.model, work.plan, uploads, weights, total, experiment.server.rate, guards.norm_bound, guards.trim
    )
    experiment.step()
    receipts = {client: Receipt.of(update) for client, update in work.updates.items()}
    metrics = measure(experiment, work.plan, receipts, heard, outcome)
    if signal == "loss":  # who evaluates the model must have it whole, and who trains it whole has it already
        others = len(cohort) - (0 if work.plan.spectra else len(work.plan))
        metrics["bytes_down"] = sum(shard.nbytes for shard in work.plan.values()) + others * experiment.dense_nbytes
    return metrics


def summarize(metrics: Metrics, names: list[str]) -> Metrics:
    """Add what the tasks have in common: sums of bytes and counts, means of accuracies and losses."""
    common: Metrics = {key: sum(_numbers(metrics, names, key)) for key in SUMS}
    for key in ("train_loss", "test_accuracy", "test_loss"):
        if values := _numbers(metrics, names, key):
            common[key] = float(np.mean(values))
    return common | metrics


def _numbers(metrics: Metrics, names: list[str], key: str) -> list[float]:
    return [value for name in names if isinstance(value := metrics.get(f"{name}/{key}"), int | float)]
