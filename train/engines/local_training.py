"""What a configuration says of a client's training in one round: its optimizer, batches, loss and precision."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sharding.errors import UserError
from sharding.rng import generator, seed_of
from sharding.rounds.client import train_model
from sharding.rounds.optim import can_be_fused, clip_and_decay
from train.config.sections import LocalConfig
from train.data import Dataset
from train.data.dataset import Split
from train.engines.memory_format import channels_last
from train.registries import LOSSES

RawBatch = tuple[Tensor, Tensor]  # inputs as they are stored, and targets


def train_locally(
    model: nn.Module,
    data: Split,
    dataset: Dataset,
    local: LocalConfig,
    lr: float,
    clip: float | None,
    key: tuple[int | str, ...],
) -> Tensor:
    """Train a model that holds a client's shard, in place; return the mean loss of its steps, left on the device.

    `clip` is τ, or None. The key, (seed, round, client), determines the order of the samples, flips and dropout.
    """
    optimizer = make_optimizer(model, local, lr)
    optimizer.register_step_pre_hook(clip_and_decay(model, clip, local.decay, local.decay_of))
    device = data.targets.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of("dropout", *key))
        losses = train_model(model, raw_batches(data, dataset, local, key), optimizer, loss_of(dataset, local))
    return sum(losses, torch.zeros((), device=device)) / len(losses)


def loss_of(dataset: Dataset, local: LocalConfig) -> Callable[[nn.Module, RawBatch], Tensor]:
    """Return the function of a model and a raw batch that is minimized; it prepares the batch."""

    def loss(model: nn.Module, batch: RawBatch) -> Tensor:
        inputs, targets = channels_last(dataset.prepare(batch[0])), batch[1]
        low = local.precision == "bfloat16"
        autocast = torch.autocast(inputs.device.type, torch.bfloat16, enabled=low)  # products; the rest stays float32
        smaller = local.compile and len(targets) != local.batch_size  # each size would be compiled again
        with autocast, torch.compiler.set_stance("force_eager") if smaller else nullcontext():
            return LOSSES[local.loss](model(inputs), targets, dataset.ignore_index)

    return loss


def make_optimizer(model: nn.Module, local: LocalConfig, lr: float) -> Optimizer:
    """Return the configured optimizer of the parameters that train, fused where torch can and no option excludes it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    part = local.optimizer
    chosen = part.options.keys() & {"fused", "foreach", "differentiable"}  # torch takes one of them at most
    fused = part.takes("fused") and not chosen and can_be_fused(model)
    optimizer: Optimizer = part.build(parameters, lr=lr, **({"fused": True} if fused else {}))
    return optimizer


def draw_passes(data: Split, dataset: Dataset, local: LocalConfig, key: tuple[int | str, ...]) -> Split:
    """Return the samples of all epochs or steps in order of use, raw and augmented; each epoch is a permutation.

    Raise a UserError if the client has none: a step on an empty batch would only decay.
    """
    if len(data) == 0:
        raise UserError("the client has no samples to train on")
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


def raw_batches(data: Split, dataset: Dataset, local: LocalConfig, key: tuple[int | str, ...]) -> Iterator[RawBatch]:
    """Yield raw batches in order of use; the last of an epoch may be smaller than the others."""
    drawn = draw_passes(data, dataset, local, key)
    length = len(data) if local.steps is None else len(drawn)
    for inputs, targets in zip(drawn.inputs.split(length), drawn.targets.split(length), strict=True):
        yield from zip(inputs.split(local.batch_size), targets.split(local.batch_size), strict=True)
