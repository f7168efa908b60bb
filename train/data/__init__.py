"""The datasets of the experiments, by name: kept on the device, prepared there in batches."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from models.options import check_options
from sharding.errors import pick
from train.data.dataset import Dataset, Split, checked
from train.data.digits import DIGITS, load_digits
from train.data.shakespeare import empty_shakespeare, load_shakespeare
from train.data.synthetic import SYNTHETIC, load_synthetic
from train.data.vision import SOURCES, empty_images, load_images

__all__ = ["DATASETS", "Dataset", "Split", "default_root", "empty_dataset", "load_dataset"]


# (root, download, and the dataset's own options by keyword) -> the dataset
Loader = Callable[..., Dataset]

DATASETS: dict[str, Loader] = {
    "digits": load_digits,
    "shakespeare": load_shakespeare,
    "synthetic": load_synthetic,
    **{name: partial(load_images, name) for name in SOURCES},
}

# (the dataset's own options by keyword) -> the dataset without samples
_EMPTY: dict[str, Callable[..., Dataset]] = {
    "digits": lambda: DIGITS,
    "shakespeare": empty_shakespeare,
    "synthetic": lambda **_: SYNTHETIC,
    **{name: partial(empty_images, name) for name in SOURCES},
}


def empty_dataset(name: str, options: Mapping[str, object] | None = None) -> Dataset:
    """Return a dataset, as `load_dataset`, with two empty splits. Only your own datasets are loaded for that.

    Raises:
        UserError: an unknown dataset, or your own cannot be loaded.
    """
    if name in _EMPTY:
        return _EMPTY[name](**(options or {}))
    return load_dataset(name, options=options).without_samples()


def load_dataset(
    name: str, root: str | Path | None = None, download: bool = False, options: Mapping[str, object] | None = None
) -> Dataset:
    """Load a dataset into memory.

    Args:
        name: a key of `DATASETS`.
        root: folder that holds the dataset's folder, `default_root()` if not given; `digits` and `synthetic` need none.
        download: fetch an image dataset into `root` when it is not there.
        options: the loader's own keyword-only arguments.

    Raises:
        UserError: an unknown dataset or option, or the data are missing or malformed, also those of your own dataset.
    """
    load = pick(DATASETS, name, "dataset")
    options = options or {}
    check_options(name, load, options, "data.options")
    return checked(load(default_root() if root is None else Path(root).expanduser(), download, **options))


def default_root() -> Path:
    """Return the default folder of the datasets: `$SHARDING_DATA`, or `data` in the current folder."""
    return Path(os.environ.get("SHARDING_DATA") or "data").expanduser()
