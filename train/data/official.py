"""Read image datasets in the layouts in which their authors publish them.

CIFAR-10, CIFAR-100 and MNIST are read, and fetched, by torchvision; TinyImageNet is a tree of JPEG files.
"""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torchvision import datasets

from sharding.errors import UserError
from train.data.images import Images, decode


def read_cifar(kind: type[datasets.CIFAR10], folder: Path, training: bool) -> Images:
    """Read `folder/cifar-10-batches-py` or `folder/cifar-100-python`."""
    split = _open(kind, folder, training)
    inputs = torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous()  # from (samples, height, width, channels)
    return Images(inputs, torch.tensor(split.targets))


def read_mnist(folder: Path, training: bool) -> Images:
    """Read `folder/MNIST/raw`."""
    split = _open(datasets.MNIST, folder, training)
    return Images(split.data[:, None], split.targets)


def read_tiny_imagenet(folder: Path, training: bool) -> Images:
    """Read `folder/tiny-imagenet-200`, its validation images for testing: the test labels are not published."""
    tree = folder / "tiny-imagenet-200"
    classes = sorted((tree / "wnids.txt").read_text(encoding="utf-8").split())
    number = {name: label for label, name in enumerate(classes)}
    if training:
        files = [(file, number[name]) for name in classes for file in sorted((tree / "train" / name).rglob("*.JPEG"))]
        files.sort(key=lambda item: (int(item[0].stem.rpartition("_")[2]), item[1]))  # n01443537_0.JPEG, …: by number
    else:
        lines = [line.split("\t") for line in (tree / "val" / "val_annotations.txt").read_text("utf-8").splitlines()]
        files = [(tree / "val" / "images" / line[0], number[line[1]]) for line in lines]
    inputs = decode((file.read_bytes() for file, _ in files), (3, 64, 64))
    return Images(inputs, torch.tensor([label for _, label in files]))


READERS: dict[str, Callable[[Path, bool], Images]] = {
    "cifar10": partial(read_cifar, datasets.CIFAR10),
    "cifar100": partial(read_cifar, datasets.CIFAR100),
    "mnist": read_mnist,
    "tiny_imagenet": read_tiny_imagenet,
}

DOWNLOADS: dict[str, Callable[..., object]] = {
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
    "mnist": datasets.MNIST,
}


def download(name: str, folder: Path) -> None:
    """Fetch a dataset into `folder`, in its official layout.

    Raises:
        UserError: torchvision cannot fetch this dataset, or the download failed.
    """
    if name not in DOWNLOADS:
        raise UserError(f"data.download=true cannot fetch {name}, only {', '.join(DOWNLOADS)}; place it in {folder}")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # every attempt and its failure
            DOWNLOADS[name](folder, download=True)
    except (OSError, RuntimeError) as error:
        if made:
            rmtree(made[-1], ignore_errors=True)
        words = " ".join(str(error).split())[:300]
        raise UserError(f"could not download {name} into {folder}: {words}; place it there by other means") from error


def _open(dataset: Callable[..., Any], folder: Path, training: bool) -> Any:
    """Open one of torchvision's datasets, which check that their files are whole."""
    try:
        return dataset(folder, train=training)
    except RuntimeError as error:
        raise UserError(
            f"incomplete files under {folder}: replace them with valid ones, or remove them and set data.download=true"
        ) from error
