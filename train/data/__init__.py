"""The datasets of the experiments, by name: decoded once, kept on the device, prepared there in batches."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from models.options import check_options
from sharding.errors import UserError, pick
from train.data.dataset import Dataset, Split
from train.data.digits import digits_of, load_digits
from train.data.shakespeare import LENGTH, load_shakespeare, shakespeare_of
from train.data.vision import SOURCES, images_of, load_images

__all__ = ["DATASETS", "Dataset", "Split", "empty_dataset", "load_dataset"]


def _folder(name: str, root: Path | None) -> Path:
    if root is None:
        raise UserError(f"dataset {name} needs data.root=…, the folder that holds it")
    return root


def _load_images(name: str, root: Path | None, download: bool, limit: int | None) -> Dataset:
    return load_images(name, _folder(name, root), download, limit)


def _load_text(
    root: Path | None, download: bool, limit: int | None, *, length: int = LENGTH, share: float = 1.0
) -> Dataset:
    return load_shakespeare(_folder("shakespeare", root), length=length, share=share)


def _no_text(train: Split, test: Split, *, length: int = LENGTH, share: float = 1.0) -> Dataset:
    return shakespeare_of(train, test, length)


# (root if given, download, limit, and the dataset's own options by keyword) -> the dataset
Loader = Callable[..., Dataset]

DATASETS: dict[str, Loader] = {
    "digits": lambda root, download, limit: load_digits(),
    "shakespeare": _load_text,
    **{name: partial(_load_images, name) for name in SOURCES},
}

# (an empty training split, an empty test split, and the dataset's own options by keyword) -> the dataset
_EMPTY: dict[str, Callable[..., Dataset]] = {
    "digits": digits_of,
    "shakespeare": _no_text,
    **{name: partial(images_of, name) for name in SOURCES},
}


def empty_dataset(name: str, options: Mapping[str, object] | None = None) -> Dataset:
    """Return what is known of a dataset without its samples: both splits are empty, nothing is read.

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
        root: folder that holds the dataset's folder; `digits` needs none, and others may not.
        download: fetch an image dataset into `root` when it is not there.
        limit: read just the first so many images of each split, to try something quickly; the embedded digits
            and the text are small, and are always read whole.
        options: the loader's own keyword-only arguments.

    Raises:
        UserError: an unknown dataset or option, no root, or nothing of the expected form there.
    """
    load = pick(DATASETS, name, "dataset")
    options = options or {}
    check_options(name, load, options, "data.options")
    return load(None if root is None else Path(root).expanduser(), download, limit, **options)
