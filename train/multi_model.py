"""Several models trained at once by the same clients; each client sends at most one update per round (MMFL).

The rounds are those of `train.rounds`. Only the selection differs: it also assigns each client to a model.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from sharding.client_sampling import Participation, TaskSampler
from sharding.client_sampling.optimal import REPORT_BYTES
from sharding.planner import Client, Plan
from train.assembly import assemble, make_sampler
from train.config.schema import Config
from train.engines import Update
from train.experiment import Experiment, Metrics, Work, reported_norms
from train.runtime.clock import Clock

SUMS = ("bytes_down", "bytes_up", "bytes_dense", "heard", "failed")
MEANS = ("train_loss", "test_accuracy", "test_loss", "train_set_accuracy", "train_set_loss")


@dataclass
class MultiModel:
    """The parts of a run of several models.

    Attributes:
        parts: an experiment for each task; their own samplers are not used.
        sampler: of all tasks.
        model: all models, which are saved and loaded together.
    """

    config: Config
    parts: Mapping[str, Experiment]
    sampler: TaskSampler
    model: nn.ModuleDict

    @property
    def result(self) -> nn.ModuleDict:
        """The models to evaluate."""
        return nn.ModuleDict({name: part.result for name, part in self.parts.items()})

    def close(self) -> None:
        """Release the engines' processes, if any."""
        for part in self.parts.values():
            part.close()

    def begin(self, cohort: list[int], t: int, clock: Clock) -> dict[str, Work]:
        """Select the model for which each client counts, and train.

        If the sampler needs the norms of the updates, all models are trained before it selects.
        """
        sampler, trained = self.sampler, dict[str, tuple[Plan, dict[Client, Update]]]()
        for name, part in self.parts.items() if sampler.needs_norms else ():
            plan = part.plan(cohort, t, clock)
            with clock("train"):
                trained[name] = plan, dict(part.train(plan, t))
        with clock("train"):
            probabilities = sampler.probabilities(t, signals(self, cohort, t, trained))
        work: dict[str, Work] = {}
        for (name, part), chosen in zip(self.parts.items(), sampler.assign(t, cohort, probabilities), strict=True):
            if name in trained:
                plan, updates = trained[name][0], iter(trained[name][1].items())
            else:
                plan = part.plan(list(chosen), t, clock)
                updates = part.train(plan, t)
            heard = weigh(part, cohort, chosen, sampler.signal)
            work[name] = Work(plan, heard, updates, whole_downloads(part, plan, cohort, sampler.signal))
        return work

    def summarize(self, found: Mapping[str, Metrics], num_clients: int) -> Metrics:
        """Return each model's metrics under its name, and over models sums of bytes and counts, means of the others."""
        lost = {f"{name}/{client}": why for name, its in found.items() for client, why in its["failures"].items()}
        common: Metrics = {"clients": num_clients, "failures": lost} | {key: sum(_numbers(found, key)) for key in SUMS}
        common["failed_by_kind"] = dict(sum((Counter(its["failed_by_kind"]) for its in found.values()), Counter()))
        common |= {key: float(np.mean(values)) for key in MEANS if (values := _numbers(found, key))}
        return common | {f"{name}/{key}": value for name, its in found.items() for key, value in its.items()}


def assemble_models(config: Config) -> MultiModel:
    """Build the parts of a run of several models, without writing anything.

    Raises:
        UserError: as `train.assembly.assemble`.
    """
    experiments = {name: assemble(task) for name, task in config.task_configs().items()}
    first = next(iter(experiments.values()))
    sampler = make_sampler(config, first.num_samples, dict.fromkeys(first.num_samples, 1.0))
    assert isinstance(sampler, TaskSampler)
    model = nn.ModuleDict({name: experiment.model for name, experiment in experiments.items()})
    return MultiModel(config, experiments, sampler, model)


def signals(
    models: MultiModel, cohort: list[int], t: int, trained: Mapping[str, tuple[Plan, Mapping[Client, Update]]]
) -> NDArray[np.float64]:
    """Return the sampler's signals, (n, S): d_is times the norm of client i's update of model s, times its loss, or 0.

    There are n clients in the cohort and S models. `trained` has plan and updates of each that is trained already.
    """
    found = np.zeros((len(cohort), len(models.parts)))
    for s, (name, part) in enumerate(models.parts.items()):
        sizes = np.array([part.num_samples[client] for client in cohort], dtype=np.float64)
        if name in trained:
            norms = reported_norms(*trained[name], part.step_size(t))
            found[:, s] = [norms.get(client, 0.0) for client in cohort]  # a client that could not train reports no norm
        elif models.sampler.signal == "loss":
            found[:, s] = local_losses(part, cohort)
        found[:, s] *= sizes / sizes.sum()
    return found


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


def weigh(part: Experiment, cohort: list[int], chosen: Mapping[int, float], signal: str) -> Participation:
    """Return the clients that send an update of one model, each weighted by D_i/p_{s|i}."""
    samples = part.num_samples
    reports = REPORT_BYTES * len(cohort) * (signal in ("norm", "loss"))
    weights: dict[Client, float] = {client: samples[client] * weight for client, weight in chosen.items()}
    return Participation(weights, float(sum(samples[client] for client in cohort)), report_bytes=reports)


def whole_downloads(part: Experiment, plan: Plan, cohort: list[int], signal: str) -> int:
    """Return the bytes of whole models sent for evaluation; clients that train the whole model have it already."""
    others = len(cohort) - (0 if plan.spectra else len(plan))
    return others * part.dense_nbytes if signal == "loss" else 0


def _numbers(found: Mapping[str, Metrics], key: str) -> list[float]:
    return [value for its in found.values() if isinstance(value := its.get(key), int | float)]
