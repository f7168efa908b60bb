"""A dataset: raw tensors that are moved to the device once, and how to prepare a batch there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharding.errors import UserError


@dataclass(frozen=True)
class Split:
    """Samples as they are stored.

    Attributes:
        inputs: uint8 images (samples, channels, height, width), int64 token ids (samples, length), or float32
            features (samples, features).
        targets: int64 classes (samples,), or the ids that follow the inputs (samples, length).
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Split:
        """Return the same samples on another device."""
        return Split(self.inputs.to(device), self.targets.to(device))


def unchanged(batch: Tensor) -> Tensor:
    """Return the batch itself: token ids and features need no preparation."""
    return batch


@dataclass(frozen=True)
class Dataset:
    """A training and a test split, and the facts about them that a model and a partition need.

    Attributes:
        name: key in the registry.
        train: samples to be shared out among the clients.
        test: samples held back at the server.
        num_classes: number of classes, or of token ids.
        input_shape: shape of one input without the batch.
        prepare: raw batch -> what a model reads, on the same device; a module's function, as workers import it.
        augment: (batch, generator) -> randomly changed batch for training, or None.
        ignore_index: target that counts neither in the loss nor in the accuracy (torch's -100 matches no
            class).
        natural: the training samples of each real-world client, where the data has such.
        coarse: (num_classes,) the superclass of each class, where the data has such.
        remarks: how the samples differ from the official ones; shown with every result.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    input_shape: tuple[int, ...]
    prepare: Callable[[Tensor], Tensor] = unchanged
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    ignore_index: int = -100
    natural: list[np.ndarray] | None = None
    coarse: np.ndarray | None = None
    remarks: tuple[str, ...] = ()

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same dataset with both splits on another device."""
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device))

    def without_training(self) -> Dataset:
        """Return the dataset with an empty training split, for when its samples are elsewhere."""
        return dataclasses.replace(self, train=Split(self.train.inputs[:0].clone(), self.train.targets[:0].clone()))


def labels_of(dataset: Dataset) -> np.ndarray:
    """Return the class of each training sample, (samples,).

    Raises:
        UserError: they have none.
    """
    if dataset.train.targets.ndim != 1:
        raise UserError(f"{dataset.name} has no classes to partition by; choose one of: iid, natural, power_law")
    return dataset.train.targets.cpu().numpy()


def standardize(images: Tensor) -> Tensor:
    """Give each image zero mean and unit variance over its own channels and pixels.

    The deviation is kept from falling below 1/√size, so that an image of one color becomes zeros, not NaN
    (as TensorFlow's `per_image_standardization` does).

    Args:
        images: (..., channels, height, width), any type.

    Returns:
        float32, the same shape and device.
    """
    dims, pixels = (-3, -2, -1), images.float()
    centered = pixels - pixels.mean(dims, keepdim=True)
    variance = centered.square().mean(dims, keepdim=True)  # `torch.var_mean` is several times slower on CPU
    return centered / variance.sqrt().clamp(min=images.shape[-3:].numel() ** -0.5)


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half.

    Args:
        images: (..., channels, height, width), raw or prepared.
        generator: decides which; can be on another device than the images.
    """
    coins = torch.rand(images.shape[:-3], generator=generator, device=generator.device).to(images.device)
    return torch.where(coins[..., None, None, None] < 0.5, images.flip(-1), images)
