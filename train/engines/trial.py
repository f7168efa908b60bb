"""Whether the clients of a keep ratio are trained together: they can be, and it pays.

Tried on samples of the test split and weights drawn at random, so that no client's data and no round can turn it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sharding import Shard
from sharding.rng import seed_of
from train.dropout import key_dropout
from train.engines.base import Job
from train.engines.choices import fastest, pays_together
from train.engines.folding import NotFoldableError
from train.engines.profile import Batches, Profile
from train.engines.sequential import SequentialEngine, size_of
from train.layout import channels_last
from train.local import ClientData, train_locally

log = logging.getLogger(__name__)

CLIENTS = 5  # that are tried together
GAIN = 0.1  # of the time that training together must save: it takes the memory of all, and is harder to share out
TOLERANCE = 1e-3  # of a folded model's logits from its clients' own, relative to the largest: far above rounding


def train_together(resident: nn.Module, ratio: float | None, job: Job) -> bool:
    """Tell whether to train the clients of a keep ratio, or of the whole model, together; chosen once for a job.

    Args:
        resident: the model of one client.
        ratio: r, or None for the whole model.
        job: holds the choice.
    """
    together = job.choices.together
    name = "whole" if ratio is None else str(ratio)
    if name not in together:
        together[name] = Trial(resident, job).succeeds()
    return together[name]


def choose_ways(job: Job, shards: Iterable[Shard]) -> None:
    """Make all choices of a run before its first round, given a shard of each keep ratio that it will have."""
    sequential = SequentialEngine(job)
    for shard in shards:
        train_together(sequential.resident(shard), size_of(shard), job)


class Trial:
    """Some clients of one keep ratio, of random weights and a batch of the test split each."""

    def __init__(self, resident: nn.Module, job: Job) -> None:
        self._job = replace(job, local=job.local.model_copy(update={"epochs": 1, "steps": None}))
        self._resident = resident.train()
        test, size = job.dataset.test, job.local.batch_size
        rows = (torch.arange(CLIENTS * size) % len(test.targets)).to(test.targets.device).split(size)
        self._clients = [ClientData(test.inputs[its], test.targets[its]) for its in rows]

    def succeeds(self) -> bool:
        """Tell whether to train these clients together."""
        return self._folds() and (self._is_faster() if self._job.choices.timed else self._pays())

    @torch.no_grad()
    def _folds(self) -> bool:
        """Tell whether the folded model computes what its clients' models do."""
        try:
            return self._deviation() <= TOLERANCE
        except NotFoldableError as error:
            log.info("clients are trained one by one: the model has %s", error)
        except Exception as error:  # an operation that is not by sample
            log.debug("clients are trained one by one: %s", error, exc_info=True)
        return False

    def _deviation(self) -> float:
        """Return how far the folded logits are from the clients' own."""
        profile, alone = Profile(self._resident, CLIENTS, self._job), self._resident
        before = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
        rng = torch.Generator().manual_seed(seed_of("trial"))
        for tensor in profile.state.values():
            _disturb(tensor, rng)
        batches = Batches(self._clients, self._keys(), self._job)
        folded = profile.logits(batches, 0).unflatten(0, (CLIENTS, -1))
        masks, worst = key_dropout(alone), 0.0
        try:
            for client in range(CLIENTS):
                alone.load_state_dict({name: tensor[client] for name, tensor in profile.state.items()})
                masks.begin(batches.seeds[0, client])
                logits = alone(channels_last(self._job.dataset.prepare(batches.inputs[0, client])))
                distance = (folded[client] - logits).abs().max() / logits.abs().max().clamp(min=1.0)
                worst = max(worst, float(distance))
        finally:
            alone.load_state_dict(before)
        return worst

    def _pays(self) -> bool:
        """Tell by rule whether training together is faster."""
        return pays_together(*self.operations(), self._clients[0].targets.device.type)

    def _is_faster(self) -> bool:
        """Tell by the clock whether training together is faster."""
        return fastest({"alone": self.alone, "together": self.together()}, GAIN) == "together"

    @torch.no_grad()
    def operations(self) -> tuple[int, int]:
        """Return how many operations one client's step forward takes, and how many layers with weights share them."""
        with FlopCounterMode(display=False) as counter:
            self._resident(self._job.dataset.prepare(self._clients[0].inputs))
        return counter.get_total_flops(), sum(1 for module in self._resident.modules() if module._parameters)

    def alone(self) -> None:
        """Train one after the other; nothing moves, the rate is 0."""
        job = self._job
        for data, key in zip(self._clients, self._keys(), strict=True):
            train_locally(self._resident, data, job.dataset, job.local, 0.0, job.clip, key)

    def together(self) -> Callable[[], object]:
        """Return what trains them together, at the same rate."""
        profile = Profile(self._resident, CLIENTS, self._job)
        return partial(profile.train, self._clients, self._keys(), 0.0)

    def _keys(self) -> list[tuple[int | str, ...]]:
        return [("trial", client) for client in range(CLIENTS)]


def _disturb(tensor: Tensor, rng: torch.Generator) -> None:
    """Make a parameter another one for every client."""
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=rng).to(tensor)
        tensor.mul_(1 + 0.1 * noise).add_(0.01 * noise)
