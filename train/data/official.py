"""Read image datasets in the layouts in which their authors publish them.

CIFAR-10, CIFAR-100 and MNIST are read, and fetched, by torchvision; TinyImageNet is a tree of JPEG files.
"""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torchvision import datasets

from sharding.errors import UserError
from train.data.images import Images, decode

TORCHVISION: dict[str, Callable[..., Any]] = {
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
    "mnist": datasets.MNIST,
}


def read_official(name: str, folder: Path, training: bool) -> Images:
    """Read one split of a dataset in its official layout; raise a UserError if torchvision finds damaged files."""
    if name not in TORCHVISION:
        return read_tiny_imagenet(folder, training)
    try:
        split = TORCHVISION[name](folder, train=training)
    except RuntimeError as error:
        raise UserError(
            f"incomplete files under {folder}: replace them with valid ones, or remove them and set data.download=true"
        ) from error
    pixels = torch.as_tensor(split.data)  # (samples, height, width), and channels if there are several
    inputs = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Images(inputs, torch.as_tensor(split.targets))


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
    inputs = decode((file.read_bytes() for file, _ in files), (3, 64, 64), place=lambda row: str(files[row][0]))
    return Images(inputs, torch.tensor([label for _, label in files]))


def download(name: str, folder: Path) -> None:
    """Fetch a dataset into `folder`, in its official layout, or raise a UserError if torchvision cannot."""
    if name not in TORCHVISION:
        raise UserError(f"data.download=true cannot fetch {name}, only {', '.join(TORCHVISION)}; place it in {folder}")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # every attempt and its failure
            TORCHVISION[name](folder, download=True)
    except (OSError, RuntimeError) as error:
        if created:
            rmtree(created[-1], ignore_errors=True)
        words = " ".join(str(error).split())[:300]
        raise UserError(f"could not download {name} into {folder}: {words}; place it there by other means") from error
