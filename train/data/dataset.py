"""A dataset: raw tensors that are moved to the device once, and how to prepare a batch there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sharding.errors import UserError, join_first, safe_repr
from sharding.rng import generator
from sharding.validation import as_whole

Partition = list[np.ndarray]  # by client, the indices of its samples, ascending, int64


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

    def emptied(self) -> Split:
        """Return a split of the same kind without samples."""
        return Split(self.inputs[:0].clone(), self.targets[:0].clone())


EMPTY = Split(torch.empty(0), torch.empty(0))


def unchanged(batch: Tensor) -> Tensor:
    """Return the batch itself: token ids and features need no preparation."""
    return batch


@dataclass(frozen=True)
class Dataset:
    """A training and a test split, and the facts about them that a model and a partition need.

    Attributes:
        name: key in the registry.
        train: samples to be distributed among the clients.
        test: samples held back at the server.
        num_classes: number of classes, or of token ids.
        input_shape: shape of one input without the batch.
        prepare: raw batch -> what a model reads, on the same device; a module's function, as workers import it.
        augment: (batch, generator) -> randomly changed batch for training, or None.
        ignore_index: target that counts neither in the loss nor in the accuracy (torch's -100 matches no
            class).
        natural: the training samples of each real-world client, where the data has such.
        coarse: (num_classes,) the superclass of each class, where the data has such.
        class_names: (num_classes,) where the classes have names.
        client_names: the names of the clients of `natural`, where they have names.
        pad_token_id: id that fills up a row of token ids, if there is one; a model masks it.
        remarks: the ways in which the samples differ from the official ones; shown with every result.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    input_shape: tuple[int, ...]
    prepare: Callable[[Tensor], Tensor] = unchanged
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    ignore_index: int = -100
    natural: Partition | None = None
    coarse: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    pad_token_id: int | None = None
    remarks: tuple[str, ...] = ()

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same dataset with both splits on another device."""
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device))

    def without_training(self) -> Dataset:
        """Return the dataset with an empty training split, for when its samples are elsewhere."""
        return dataclasses.replace(self, train=self.train.emptied())

    def without_samples(self) -> Dataset:
        """Return the dataset with two empty splits: it only prepares and augments samples."""
        return dataclasses.replace(self, train=self.train.emptied(), test=self.test.emptied())


def default_root() -> Path:
    """Return the default folder of the datasets: `$SHARDING_DATA`, or `data` in the current folder."""
    return Path(os.environ.get("SHARDING_DATA") or "data").expanduser()


def checked(dataset: Dataset) -> Dataset:
    """Return the dataset after a check that its splits are as `Split` says, so that no round fails on them.

    Raise a UserError with the split, what it has, and what is needed. The test split must not be empty.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(f"the function of a dataset returned {safe_repr(dataset)}; a train.data.Dataset is needed")
    classes = as_whole(dataset.num_classes, f"num_classes of the dataset {dataset.name}")
    dataset = dataclasses.replace(dataset, num_classes=classes)
    for name, split in (("training", dataset.train), ("test", dataset.test)):
        if not _is_dense(split):
            raise UserError(f"the {name} split of the dataset {dataset.name} is no Split of two dense tensors")
    if not len(dataset.test):
        raise UserError(f"the dataset {dataset.name} has no test samples; evaluations need some")
    for name, split in (("training", dataset.train), ("test", dataset.test)):
        if problem := problem_of(dataset, split):
            raise UserError(f"the {name} split of the dataset {dataset.name} {problem}")
    return dataset


def _is_dense(split: object) -> bool:
    """Return whether this is a split of tensors with a first dimension and values."""
    tensors = (split.inputs, split.targets) if isinstance(split, Split) else (None,)
    return all(
        isinstance(tensor, Tensor) and tensor.ndim and tensor.layout == torch.strided and not tensor.is_meta
        for tensor in tensors
    )


def problem_of(dataset: Dataset, split: Split) -> str | None:
    """Return what makes samples unfit for a dataset, or None."""
    inputs, targets, count = split.inputs, split.targets, dataset.num_classes
    counted = targets[targets != dataset.ignore_index]
    invalid = counted[(counted < 0) | (counted >= count)].unique().tolist()
    problems = {
        f"has {len(inputs)} inputs and {len(targets)} targets; give one target each": len(inputs) != len(targets),
        f"has inputs of shape {tuple(inputs.shape[1:])}, and its input_shape is {dataset.input_shape}": (
            tuple(inputs.shape[1:]) != dataset.input_shape
        ),
        f"has inputs in {inputs.dtype}; convert them to uint8, int64 or float32": (
            inputs.dtype not in (torch.uint8, torch.int64, torch.float32)
        ),
        f"has targets in {targets.dtype}; convert them to int64 classes": targets.dtype != torch.int64,
        f"has targets of shape {tuple(targets.shape)}; give a class for each sample, or an id for each of its inputs": (
            targets.shape[1:] not in (torch.Size(), inputs.shape[1:])
        ),
        f"has no target but ignored ones; ignore_index={dataset.ignore_index}": len(targets) > 0 == len(counted),
        f"has the targets {join_first(invalid)}; with num_classes={count} they are 0 to {count - 1}": bool(invalid),
    }
    return next((reason for reason, wrong in problems.items() if wrong), None)


def digest_of(*splits: Split) -> str:
    """Return a digest of all samples, in their order."""
    digest = blake2b(digest_size=16)
    for tensor in (tensor for split in splits for tensor in (split.inputs, split.targets)):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors in reading a path, of many kinds, into a UserError that names it; but not a missing package."""
    try:
        yield
    except (UserError, ImportError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"cannot read {path}: {reason}; it is damaged, incomplete or of another kind; replace it with a valid copy"
        ) from error


def labels_of(dataset: Dataset) -> np.ndarray:
    """Return the class of each training sample, (samples,), or raise a UserError if some have none."""
    targets = dataset.train.targets
    if targets.ndim != 1 or not bool(((targets >= 0) & (targets < dataset.num_classes)).all()):
        raise UserError(f"{dataset.name} has no classes to partition by; choose one of: iid, natural, power_law")
    return targets.cpu().numpy()


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


def hold_out(dataset: Dataset, count: int, seed: int, option: str | None = None) -> Dataset:
    """Return the dataset with `count` random samples of its training split in place of the test split.

    No client has them. Natural clients keep at least one sample, their first. Raise a UserError that names the `option`
    which asked for that if nothing would be left to train on.
    """
    option = option or f"data.holdout={count}"
    if not len(dataset.train):
        raise UserError(f"{option} keeps training samples, and {dataset.name} has none; name their files or folder")
    natural = dataset.natural
    free = np.ones(len(dataset.train), dtype=bool)
    free[[0] if natural is None else [part[0] for part in natural if len(part)]] = False
    if not free.any():
        raise UserError(f"{option} needs clients with two samples, and each of {dataset.name} has one; give more data")
    if count > free.sum():
        raise UserError(f"{option} must be at most {free.sum()}, so that all clients of {dataset.name} train")
    held_out = np.zeros(len(free), dtype=bool)
    held_out[generator(seed, "holdout").choice(np.flatnonzero(free), count, replace=False)] = True
    new_index = np.cumsum(~held_out) - 1  # of each sample that remains
    if natural is not None:
        natural = [new_index[part[~held_out[part]]] for part in natural]
    remark = f"tested on {count:,} training samples kept from the clients"
    return dataclasses.replace(
        dataset,
        train=_rows(dataset.train, ~held_out),
        test=_rows(dataset.train, held_out),
        natural=natural,
        remarks=(*dataset.remarks, remark),
    )


def _rows(split: Split, chosen: np.ndarray) -> Split:
    rows = torch.from_numpy(np.flatnonzero(chosen)).to(split.targets.device)
    return Split(split.inputs[rows], split.targets[rows])
