"""A client's training in one round: SGD on its shard by default, with clipping and decay."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import isfinite

import numpy as np
import torch
from torch import Tensor, nn

from sharding.planner import Client
from sharding.rng import generator, seed_of
from train.config.registries import LOSSES, cross_entropy
from train.config.sections import LocalConfig
from train.data import Dataset
from train.data.dataset import Split
from train.engines.memory_format import channels_last

log = logging.getLogger(__name__)


class Shares(Mapping[Client, Split]):
    """The clients' samples, in one tensor that processes on one machine can share.

    Args:
        inputs: those of all clients, one client after the other.
        targets: those of all clients, in the same order.
        sizes: D_c of clients 0, 1, ….
    """

    def __init__(self, inputs: Tensor, targets: Tensor, sizes: Sequence[int]) -> None:
        self._inputs, self._targets = inputs, targets
        self._ends = list(accumulate(sizes, initial=0))

    def __getitem__(self, client: Client) -> Split:
        if client not in range(len(self)):
            raise KeyError(client)
        rows = slice(self._ends[int(client)], self._ends[int(client) + 1])
        return Split(self._inputs[rows], self._targets[rows])

    def all(self) -> Split:
        """Return the samples of all clients, one client after the other."""
        return Split(self._inputs, self._targets)

    def __iter__(self) -> Iterator[Client]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._ends) - 1


def train_locally(
    model: nn.Module,
    data: Split,
    dataset: Dataset,
    local: LocalConfig,
    lr: float,
    clip: float | None,
    key: tuple[int | str, ...],
) -> Tensor:
    """Train `model` in place and return the mean loss of its steps, a scalar left on the device.

    Args:
        model: the factorized model that holds the client's shard.
        data: the client's samples.
        dataset: prepares and augments a raw batch.
        local: epochs, batch size, momentum, decay.
        lr: of this round.
        clip: τ, or None for no clipping.
        key: (seed, round, client); determines the order of the samples, flips and dropout.
    """
    model.train()
    optimizer = local.optimizer.build(model, local.decay, clip, local.decay_of, lr=lr)
    device, low = data.targets.device, local.precision == "bfloat16"
    total, steps = torch.zeros((), device=device), 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of("dropout", *key))
        for inputs, targets in _batches(data, dataset, local, key):
            with torch.autocast(device.type, torch.bfloat16, enabled=low):  # matrix products; all else stays float32
                loss = LOSSES[local.loss](model(inputs), targets, dataset.ignore_index)
            optimizer.step(loss)
            total += loss.detach()
            steps += 1
    return total / steps


def draw_passes(data: Split, dataset: Dataset, local: LocalConfig, key: tuple[int | str, ...]) -> Split:
    """Return the samples of all epochs or steps in order of use, raw and augmented; each epoch is a permutation."""
    rng = generator("batches", *key)
    if local.steps is None:
        drawn = np.concatenate([rng.permutation(len(data)) for _ in range(local.epochs)])
    else:
        drawn = rng.integers(len(data), size=local.steps * local.batch_size)
    order = torch.from_numpy(drawn).to(data.targets.device)
    inputs = data.inputs[order]
    if dataset.augment is not None:
        inputs = dataset.augment(inputs, torch.Generator().manual_seed(seed_of("augment", *key)))
    return Split(inputs, data.targets[order])


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, data: Split, batch_size: int = 512) -> tuple[float, float]:
    """Return (accuracy in 0…1, mean cross-entropy) of a model over all targets of `data` but the ignored ones.

    Samples are prepared as `dataset` says, and never augmented.
    """
    inputs, targets = data.inputs, data.targets
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    for batch, wanted in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        logits = model(channels_last(dataset.prepare(batch)))
        counted = wanted != dataset.ignore_index
        loss = cross_entropy(logits, wanted, dataset.ignore_index, reduction="sum")
        sums += torch.stack([((logits.argmax(-1) == wanted) & counted).sum(), loss, counted.sum()])
    correct, loss_sum, count = sums.tolist()
    if not isfinite(loss_sum):
        log.warning(
            "the model's loss on %s is %s: lower local.optimizer.lr or server_optimizer.lr", dataset.name, loss_sum
        )
    return correct / count, loss_sum / count


def _batches(
    data: Split, dataset: Dataset, local: LocalConfig, key: tuple[int | str, ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield prepared batches; the last of an epoch may be smaller than the others."""
    drawn = draw_passes(data, dataset, local, key)
    length = len(data) if local.steps is None else len(drawn)
    for inputs, targets in zip(drawn.inputs.split(length), drawn.targets.split(length), strict=True):
        for batch, wanted in zip(inputs.split(local.batch_size), targets.split(local.batch_size), strict=True):
            yield channels_last(dataset.prepare(batch)), wanted
