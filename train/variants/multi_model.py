"""Several models trained at once by the same clients; each client sends at most one update per round (MMFL).

The rounds have the steps of `train.rounds`, for each model. The selection also assigns each client to a model.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from sharding import Plan
from sharding.client_sampling import Participation, TaskSampler
from sharding.client_sampling.optimal import REPORT_BYTES, reject
from sharding.rounds.failures import Failure
from sharding.rounds.plan import Client
from train.callbacks import Callback
from train.config.schema import Config
from train.engines.two_stage import report
from train.experiment.assembly import build_experiment, make_sampler, simulate_clients
from train.experiment.clock import Clock
from train.experiment.evaluation import rows_at_once, scores
from train.experiment.experiment import Experiment
from train.experiment.history import History
from train.experiment.metrics import RoundMetrics, measure
from train.rounds import collect

MEANS = ("train_loss", "test_accuracy", "test_loss", "train_set_accuracy", "train_set_loss")


@dataclass
class MultiModel:
    """Several models, whose experiments are the `parts`, by name; the sampler chooses a model for each client."""

    config: Config
    parts: Mapping[str, Experiment]
    sampler: TaskSampler
    _cohort: list[int] = field(default_factory=list, init=False)
    _assigned: list[dict[int, float]] = field(default_factory=list, init=False)
    _rejected: dict[str, dict[Client, Failure]] = field(default_factory=dict, init=False)

    @property
    def model(self) -> nn.Module:
        """All models, which are saved and loaded together."""
        return nn.ModuleDict({name: one.model for name, one in self.parts.items()})

    @property
    def result(self) -> nn.Module:
        """The models to evaluate."""
        return nn.ModuleDict({name: one.result for name, one in self.parts.items()})

    def close(self) -> None:
        """Release the engines' processes, if there are any."""
        for one in self.parts.values():
            one.close()

    def invite(self, t: int) -> dict[str, list[int]]:
        """Return the clients that train each model: all of them, if they are selected by their norms."""
        self._cohort = self.sampler.cohort(t)
        if self.sampler.needs_norms:
            return dict.fromkeys(self.parts, self._cohort)
        losses: dict[str, dict[Client, float]] = {}
        if self.sampler.signal == "loss":
            for name, one in self.parts.items():
                losses[name] = dict(zip(self._cohort, local_losses(one, self._cohort).tolist(), strict=True))
        self._assign(t, losses)
        return {name: list(chosen) for name, chosen in zip(self.parts, self._assigned, strict=True)}

    def select(
        self, t: int, plans: Mapping[str, Plan], norms: Mapping[str, Mapping[Client, float]]
    ) -> dict[str, Participation]:
        """Return for each model the clients that send an update of it, each weighted by D_i/p_{s|i}."""
        if norms:
            self._assign(t, norms)
        return {
            name: self._weigh(name, plans[name], chosen)
            for name, chosen in zip(self.parts, self._assigned, strict=True)
        }

    def _assign(self, t: int, signals: Mapping[str, Mapping[Client, float]]) -> None:
        """Draw each client's model by d_is times its signal; by the clients alone where there are no signals.

        The signal is 0 for a model that the client could not train, or of which it reported no number.
        """
        self._rejected = {name: reject(signals.get(name, {}), t, self.sampler.signal) for name in self.parts}
        scaled = np.zeros((len(self._cohort), len(self.parts)))
        for s, (name, one) in enumerate(self.parts.items()):
            if name in signals:
                usable = signals[name].keys() - self._rejected[name].keys()
                values = np.array([signals[name][client] if client in usable else 0.0 for client in self._cohort])
                sizes = np.array([one.clients.num_samples[client] for client in self._cohort], dtype=np.float64)
                scaled[:, s] = values * sizes / sizes.sum()
        self._assigned = self.sampler.assign(t, self._cohort, self.sampler.probabilities(t, scaled))

    def _weigh(self, name: str, plan: Plan, chosen: Mapping[int, float]) -> Participation:
        one, rejected, signal, invited = self.parts[name], self._rejected[name], self.sampler.signal, len(self._cohort)
        samples = one.clients.num_samples
        weights: dict[Client, float] = {
            client: samples[client] * weight for client, weight in chosen.items() if client not in rejected
        }
        # To report its loss, a client downloads the whole model, unless it trains the whole model anyway.
        downloads = invited - (0 if plan.spectra else len(plan))
        return Participation(
            weights,
            float(sum(samples[client] for client in self._cohort)),
            rejected,
            report_bytes=REPORT_BYTES * invited * (signal in ("norm", "loss")),
            download_bytes=downloads * one.dense_nbytes if signal == "loss" else 0,
        )

    def summarize(self, metrics: Mapping[str, RoundMetrics]) -> RoundMetrics:
        """Return sums of bytes and counts, means of losses and accuracies, and each model's metrics by its name."""
        of_models = list(metrics.values())
        kinds = sum((Counter(one.failed_by_kind or {}) for one in of_models), Counter())
        means: dict[str, Any] = {
            key: float(np.mean(values))
            for key in MEANS
            if (values := [value for one in of_models if (value := getattr(one, key)) is not None])
        }
        return RoundMetrics(
            round=of_models[0].round,
            num_clients=len(self._cohort),
            num_aggregated=sum(one.num_aggregated or 0 for one in of_models),
            num_failed=sum(one.num_failed or 0 for one in of_models),
            failed_by_kind=dict(kinds),
            failures={
                f"{name}/{client}": reason
                for name, one in metrics.items()
                for client, reason in (one.failures or {}).items()
            },
            bytes_down=sum(one.bytes_down for one in of_models),
            bytes_up=sum(one.bytes_up for one in of_models),
            bytes_dense=sum(one.bytes_dense for one in of_models),
            extra={
                f"{name}/{key}": value
                for name, one in metrics.items()
                for key, value in one.to_dict().items()
                if key not in ("round", "bytes_total")
            },
            **means,
        )


def run_multi_model(
    models: MultiModel, start: int = 0, callbacks: Sequence[Callback] = (), history: History | None = None
) -> RoundMetrics | None:
    """Run the rounds of several models from `start`, as `train.rounds.run_rounds` runs those of one.

    The callbacks get the plans by model.
    """
    config, parts = models.config, models.parts
    history, metrics = history or History(config), None
    for t in range(start, config.rounds):
        clock, measured = Clock(), dict[str, RoundMetrics]()
        cohorts = models.invite(t)

        with clock("plan"):
            plans = {name: one.plan(cohorts[name], t) for name, one in parts.items()}

        with clock("train"):
            if models.sampler.needs_norms:  # clients keep their updates until the server has selected by the norms
                reports = {name: report(one.engine, plans[name], t, one.lr(t)) for name, one in parts.items()}
                selected = models.select(t, plans, {name: each.norms for name, each in reports.items()})
                replies = {name: each.collect(selected[name].weights) for name, each in reports.items()}
            else:  # updates are averaged as they arrive
                selected = models.select(t, plans, {})
                replies = {name: one.engine.train(plans[name], t, one.lr(t)) for name, one in parts.items()}

        for name, one in parts.items():
            with clock("train"):
                average, losses = collect(one, plans[name], selected[name], replies[name])

            with clock("aggregate"):
                outcome = one.server.step(average)

            measured[name] = measure(one, t, plans[name], selected[name], outcome, losses)
            one.with_residual.update(measured[name].new_clients or ())
            if config.evaluates(t):
                with clock("evaluate"):
                    measured[name] |= scores(one)

        metrics = models.summarize(measured) | clock.seconds()
        metrics |= history.complete(metrics)

        stops = [callback.after_round(metrics, plans) for callback in callbacks]
        if metrics.stopped or any(stops):
            break
    return metrics


def assemble_models(config: Config) -> MultiModel:
    """Build what a run of several models needs, with the errors of `train.experiment.assembly.assemble` for each."""
    configs = {of_model.name: of_model for of_model in config.models()}
    simulated = {name: simulate_clients(of_model) for name, of_model in configs.items()}
    _, clients, _ = next(iter(simulated.values()))
    sampler = make_sampler(config, clients.num_samples, dict.fromkeys(clients.num_samples, 1.0), config.seed)
    assert isinstance(sampler, TaskSampler)  # the configuration is checked
    parts = {name: build_experiment(configs[name], *simulated[name], sampler) for name in configs}
    return MultiModel(config, parts, sampler)


@torch.no_grad()
def local_losses(experiment: Experiment, cohort: list[int], batch_size: int = 512) -> NDArray[np.float64]:
    """Return the mean loss of the server's model on each client's own data, (n,), in batches as `evaluate` has."""
    model, dataset = experiment.model.eval(), experiment.dataset
    data = [experiment.job.clients[client] for client in cohort]
    inputs, targets = torch.cat([part.inputs for part in data]), torch.cat([part.targets for part in data])
    owners = torch.repeat_interleave(torch.arange(len(data)), torch.tensor([len(part) for part in data]))
    sums = torch.zeros(2, len(data), dtype=torch.float64, device=targets.device)  # of losses, and of targets
    owners = owners.to(targets.device)
    rows = rows_at_once(dataset, data[0], batch_size)
    for batch, labels, owner in zip(*(x.split(rows) for x in (inputs, targets, owners)), strict=True):
        logits = model(dataset.prepare(batch)).movedim(-1, 1)
        losses = F.cross_entropy(logits, labels, ignore_index=dataset.ignore_index, reduction="none")
        for row, values in zip(sums, (losses, labels != dataset.ignore_index), strict=True):
            row.index_add_(0, owner, values.double().flatten(1).sum(1) if values.dim() > 1 else values.double())
    return np.asarray((sums[0] / sums[1]).cpu().numpy())
