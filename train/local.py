"""A client's training in one round: plain SGD on its shard, clipped and decayed as the design says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.optim import clip_effective_lr, clip_factors, factorized_layers, frobenius_decay
from sharding.rng import generator, seed_of
from train.config import LocalConfig
from train.data import Dataset


@dataclass(frozen=True)
class ClientData:
    """One client's samples, raw, on the training device: inputs (D_c, …) and targets (D_c, …)."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def train_locally(
    model: nn.Module,
    data: ClientData,
    dataset: Dataset,
    local: LocalConfig,
    lr: float,
    clip: float | None,
    key: tuple[int | str, ...],
) -> Tensor:
    """Train `model` in place and return the mean cross-entropy of its steps, a scalar left on the device.

    Args:
        model: the factorized model that holds the client's shard.
        data: the client's samples.
        dataset: says how to prepare and augment a raw batch.
        local: epochs, batch size, momentum, decay.
        lr: of this round.
        clip: τ, or None for no clipping.
        key: (seed, round, client); the order of the samples, flips and dropout follow from it alone.
    """
    model.train()
    layers = factorized_layers(model)
    factors = None if clip is None else clip_factors(layers, clip)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=local.momentum, fused=True)
    total, steps = torch.zeros((), device=data.targets.device), 0
    with torch.random.fork_rng(devices=_cuda_devices(data)):
        torch.manual_seed(seed_of("dropout", *key))
        for inputs, targets in _batches(data, dataset, local, key):
            loss = cross_entropy(model(inputs), targets, dataset.ignore_index)
            decay = local.frobenius_decay * frobenius_decay(layers) if layers and local.frobenius_decay else 0.0
            optimizer.zero_grad()
            (loss + decay).backward()
            if factors is not None:
                clip_effective_lr(layers, factors)
            optimizer.step()
            total += loss.detach()
            steps += 1
    return total / steps


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, batch_size: int = 512) -> tuple[float, float]:
    """Return (accuracy in 0…1, mean cross-entropy) on the test split, over all targets but the ignored ones."""
    inputs, targets = dataset.test.inputs, dataset.test.targets
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    for batch, wanted in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        logits = model(_channels_last(dataset.prepare(batch)))
        counted = wanted != dataset.ignore_index
        loss = cross_entropy(logits, wanted, dataset.ignore_index, reduction="sum")
        sums += torch.stack([((logits.argmax(-1) == wanted) & counted).sum(), loss, counted.sum()])
    correct, loss_sum, count = sums.tolist()
    return correct / count, loss_sum / count


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits (…, classes) against targets (…)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction)


def _batches(
    data: ClientData, dataset: Dataset, local: LocalConfig, key: tuple[int | str, ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield prepared batches of all epochs; each epoch is a fresh permutation, its last batch may be smaller."""
    device = data.targets.device
    rng = generator("batches", *key)
    orders = np.stack([rng.permutation(len(data)) for _ in range(local.epochs)])
    flips = torch.Generator(device).manual_seed(seed_of("augment", *key))
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = dataset.augment
    for order in torch.from_numpy(orders).to(device):
        for rows in order.split(local.batch_size):
            batch = data.inputs[rows]
            if augment is not None:
                batch = augment(batch, flips)
            yield _channels_last(dataset.prepare(batch)), data.targets[rows]


def _channels_last(inputs: Tensor) -> Tensor:
    """Lay images out with channels innermost, which convolutions to a few channels run faster on."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs


def _cuda_devices(data: ClientData) -> list[torch.device]:
    return [data.targets.device] if data.targets.is_cuda else []
