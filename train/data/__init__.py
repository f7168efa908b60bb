"""The datasets of the experiments, by name: decoded once, kept on the device, prepared there in batches."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from models.options import check_options
from sharding.errors import pick
from train.data.dataset import Dataset, Split
from train.data.digits import digits_of, load_digits
from train.data.shakespeare import LENGTH, load_shakespeare, shakespeare_of
from train.data.synthetic import load_synthetic, synthetic_of
from train.data.vision import SOURCES, images_of, load_images

__all__ = ["DATASETS", "Dataset", "Split", "default_root", "empty_dataset", "load_dataset"]


def _load_text(root: Path, download: bool, limit: int | None, *, length: int = LENGTH, share: float = 1.0) -> Dataset:
    return load_shakespeare(root, length=length, share=share)


def _no_text(train: Split, test: Split, *, length: int = LENGTH, share: float = 1.0) -> Dataset:
    return shakespeare_of(train, test, length)


# (root, download, limit, and the dataset's own options by keyword) -> the dataset
Loader = Callable[..., Dataset]

DATASETS: dict[str, Loader] = {
    "digits": lambda root, download, limit: load_digits(),
    "shakespeare": _load_text,
    "synthetic": load_synthetic,
    **{name: partial(load_images, name) for name in SOURCES},
}

# (an empty training split, an empty test split, and the dataset's own options by keyword) -> the dataset
_EMPTY: dict[str, Callable[..., Dataset]] = {
    "digits": digits_of,
    "shakespeare": _no_text,
    "synthetic": lambda train, test, **_: synthetic_of(train, test),
    **{name: partial(images_of, name) for name in SOURCES},
}


def empty_dataset(name: str, options: Mapping[str, object] | None = None) -> Dataset:
    """Return a dataset without its samples: both splits are empty, and nothing is read.

    Args:
        name: of a dataset of this package.
        options: as `load_dataset` takes them.

    Raises:
        UserError: an unknown dataset.
    """
    nothing = Split(torch.empty(0), torch.empty(0))
    return pick(_EMPTY, name, "dataset")(nothing, nothing, **(options or {}))


def load_dataset(
    name: str,
    root: str | Path | None = None,
    download: bool = False,
    limit: int | None = None,
    options: Mapping[str, object] | None = None,
) -> Dataset:
    """Load a dataset into memory.

    Args:
        name: a key of `DATASETS`.
        root: folder that holds the dataset's folder, `default_root()` if not given; `digits` and `synthetic` need none.
        download: fetch an image dataset into `root` when it is not there.
        limit: the number of images to read of each split, for a quick trial; digits and text are small, and always
            read completely.
        options: the loader's own keyword-only arguments.

    Raises:
        UserError: an unknown dataset or option, or the data are missing or malformed.
    """
    load = pick(DATASETS, name, "dataset")
    options = options or {}
    check_options(name, load, options, "data.options")
    return load(default_root() if root is None else Path(root).expanduser(), download, limit, **options)


def default_root() -> Path:
    """Return the default folder of the datasets: `$SHARDING_DATA`, or `data` in the current folder."""
    return Path(os.environ.get("SHARDING_DATA") or "data").expanduser()
