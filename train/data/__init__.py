"""The datasets of the experiments, by name: kept on the device, prepared there in batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

from train.data.dataset import Dataset, Split, checked, default_root
from train.data.digits import DIGITS, load_digits
from train.data.files import load_files
from train.data.shakespeare import empty_shakespeare, load_shakespeare
from train.data.synthetic import SYNTHETIC, load_synthetic
from train.data.vision import SOURCES, empty_images, load_images

__all__ = ["DATASETS", "Dataset", "Split", "default_root", "empty_dataset", "load_dataset"]


DATASETS: dict[str, Callable[..., Dataset]] = {  # functions of their options
    "digits": load_digits,
    "shakespeare": load_shakespeare,
    "synthetic": load_synthetic,
    "files": load_files,
    **{name: partial(load_images, name) for name in SOURCES},
}

_EMPTY: dict[str, Callable[..., Dataset]] = {  # the same without samples
    "digits": lambda: DIGITS,
    "shakespeare": empty_shakespeare,
    "synthetic": lambda **_: SYNTHETIC,
    **{name: partial(empty_images, name) for name in SOURCES},
}


def empty_dataset(name: str, **options: Any) -> Dataset:
    """Return a dataset, as `load_dataset`, with two empty splits. Only your own ones are loaded, with its errors."""
    return _EMPTY[name](**options) if name in _EMPTY else load_dataset(name, **options).without_samples()


def load_dataset(name: str, **options: Any) -> Dataset:
    """Load a dataset into memory.

    Args:
        name: a key of `DATASETS`.
        options: keyword arguments of the dataset's function, such as `root`, the folder that holds the dataset's
            folder, by default `default_root()`.

    Raises:
        UserError: the data are missing or malformed, also those of your own dataset.
    """
    return checked(DATASETS[name](**options))
