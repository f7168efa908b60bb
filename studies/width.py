"""Sub-models by width, a baseline for sharding: every client trains a window of each layer's channels.

- `rolling`: the window moves every round, as in FedRolex (Alam et al., NeurIPS 2022).
- `nested`: the window stays, as in HeteroFL (Diao, Ding & Tarokh, ICLR 2021). The server's model is the strongest
  client's, and the others train its first channels, so every tested channel was trained. With equally strong clients
  this is plain FedAvg of a narrow model, which `studies/beyond.py` has.

Each entry of the server's model becomes the mean over the clients that hold it, weighted by their samples. Entries that
no client holds keep their values. The width is the largest whose model has no more bytes than a shard of the client's
keep ratio. Data, cohorts, batches and step sizes are those of a sharded run. A window holds whole groups of GroupNorm,
so that a channel is normalized with the same channels as on the server.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sharding import UserError
from studies.curves import evaluations
from studies.runner import run_one_by_one
from train.config.schema import Config
from train.data import Dataset
from train.engines.local_training import train_locally
from train.engines.memory_format import keep_memory_format
from train.experiment.assembly import assemble, make_model, make_server_optimizer
from train.experiment.experiment import Experiment

State = Mapping[str, Tensor]
WINDOWS = ("rolling", "nested")


def narrow(config: Config, dataset: Dataset, most: int) -> nn.Module:
    """Return the widest ResNet with groups of the same size and at most this many bytes."""
    options = config.model.options
    of_a_group = options["width"] // options["groups"]
    for groups in range(options["groups"], 0, -1):
        model = config.model.model_copy(update={"groups": groups, "width": groups * of_a_group})
        small = make_model(config.model_copy(update={"model": model}), dataset)
        if nbytes(small.state_dict()) <= most:
            return small
    raise UserError(f"a model of one group has more than the {most} bytes of a shard; use a larger keep_ratio")


def nbytes(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def windows(full: Tensor, small: Tensor, groups: int, shift: int) -> tuple[Tensor, ...]:
    """Return the indices, one tensor per dimension, of the entries of `full` that `small` holds.

    Args:
        full: a tensor of the server's model.
        small: the client's tensor, no larger in any dimension.
        groups: the number of groups of channels in a layer of the full model.
        shift: the shift of the window, in groups.
    """
    indices = []
    for size, length in zip(full.shape, small.shape, strict=True):
        start = 0 if length == size else shift % groups * (size // groups)
        indices.append((torch.arange(length) + start) % size)
    return torch.meshgrid(*indices, indexing="ij")


class Averages:
    """Weighted means of the entries that clients hold."""

    def __init__(self, state: State) -> None:
        self._state = {name: tensor.double() for name, tensor in state.items()}
        self._sums = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        self._weights = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}

    def add(self, state: State, places: Mapping[str, tuple[Tensor, ...]], weight: float) -> None:
        """Add a client's model."""
        for name, tensor in state.items():
            self._sums[name][places[name]] += weight * tensor.double()
            self._weights[name][places[name]] += weight

    def state(self) -> dict[str, Tensor]:
        """Return the means, and the old values of entries without a client."""
        return {
            name: torch.where(self._weights[name] > 0, sums / self._weights[name].clamp(min=1e-300), self._state[name])
            for name, sums in self._sums.items()
        }


@dataclass
class Federation:
    """The server's model, and a client model for each keep ratio.

    Attributes:
        experiment: data, batches and sampler.
        model: the server's model.
        clients: client models by keep ratio; a client whose ratio is missing does not take part.
        groups: the number of groups of channels in a layer of the server's model.
        moves: whether the window moves.
        optimizer: takes the server's step.
    """

    experiment: Experiment
    model: nn.Module
    clients: Mapping[float, nn.Module]
    groups: int
    moves: bool
    optimizer: Optimizer

    @classmethod
    def of(cls, config: Config, kind: str) -> Self:
        """Build the start of a run of one of `WINDOWS`."""
        if config.result != "last":
            raise UserError(f"result={config.result} does not work with windows of width; use result=last")
        experiment = assemble(config)
        planner = experiment.server.planner
        clients = {
            ratio: keep_memory_format(narrow(config, experiment.dataset, planner.nbytes(experiment.model, ratio)))
            for ratio in sorted(set(experiment.keep_ratios.values()))
        }
        model = experiment.model if kind == "rolling" else keep_memory_format(deepcopy(clients[max(clients)]))
        groups = next(part.num_groups for part in model.modules() if isinstance(part, nn.GroupNorm))
        optimizer = make_server_optimizer(config, model)
        return cls(experiment, model, clients, groups, kind == "rolling", optimizer)

    def train_round(self, t: int) -> dict[str, Any]:
        """Train round `t` and return its metrics."""
        experiment, job, full = self.experiment, self.experiment.job, self.model.state_dict()
        averages, losses, sent, lr = Averages(full), [], 0, experiment.lr(t)
        for client in experiment.sampler.cohort(t):
            small = self.clients[experiment.keep_ratios[client]]
            shift = t if self.moves else 0
            indices = {name: windows(full[name], part, self.groups, shift) for name, part in small.state_dict().items()}
            small.load_state_dict({name: full[name][index] for name, index in indices.items()})
            key = (experiment.config.seed, t, client)
            losses.append(float(train_locally(small, job.clients[client], job.dataset, job.local, lr, None, key)))
            averages.add(small.state_dict(), indices, experiment.num_samples[client])
            sent += nbytes(small.state_dict())
        self.step(averages.state())
        return {
            **{"round": t, "train_loss": fmean(losses) if losses else None, "bytes_down": sent, "bytes_up": sent},
            **{"num_clients": len(losses), "num_aggregated": len(losses)},
        }

    @torch.no_grad()
    def step(self, average: Mapping[str, Tensor]) -> None:
        """Take the optimizer's step by the pseudo-gradient; buffers take their average."""
        weights = dict(self.model.named_parameters())
        for name, entry in self.model.state_dict().items():
            if name in weights:
                weights[name].grad = (entry - average[name]).to(entry.dtype)
            else:
                entry.copy_(average[name])
        self.optimizer.step()


def run_all(kind: str, configs: Mapping[str, Config], *_: object) -> pd.DataFrame:
    """Run what is missing with one of `WINDOWS`, one run at a time, and return the curves of all runs."""
    return evaluations(run_one_by_one(configs, lambda config: Federation.of(config, kind)))
