"""The datasets of the experiments, by name: decoded once, kept on the device, prepared there in batches."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from sharding.errors import UserError, pick
from train.data.dataset import Dataset, Split
from train.data.digits import load_digits
from train.data.shakespeare import load_shakespeare
from train.data.vision import SOURCES, load_images

__all__ = ["DATASETS", "Dataset", "Split", "load_dataset"]

Loader = Callable[[Path, bool, int | None], Dataset]

DATASETS: dict[str, Loader] = {
    "digits": lambda root, download, limit: load_digits(),
    "shakespeare": lambda root, download, limit: load_shakespeare(root),
    **{name: partial(load_images, name) for name in SOURCES},
}


def load_dataset(
    name: str, root: str | Path | None = None, download: bool = False, limit: int | None = None
) -> Dataset:
    """Load a dataset into memory.

    Args:
        name: a key of `DATASETS`.
        root: folder that holds the dataset's folder; `digits` needs none.
        download: fetch an image dataset into `root` when it is not there.
        limit: read just the first so many images of each split, to try something quickly; the embedded digits
            and the text are small, and are always read whole.

    Raises:
        UserError: an unknown dataset, no root, or nothing of the expected form there.
    """
    load = pick(DATASETS, name, "dataset")
    if root is None and name != "digits":
        raise UserError(f"dataset {name} needs data.root=…, the folder that holds it")
    return load(Path(root or ".").expanduser(), download, limit)
