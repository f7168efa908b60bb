"""Datasets that are drawn, in the layouts of the real ones: each class has a picture of its own, under noise."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike
from PIL import Image
from pyarrow import parquet

MNIST = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)  # training images of each class, as published


def write_all(root: Path) -> None:
    """Write `mnist` (as many to train on as there are), and a few of `cifar10`, `cifar100` and `shakespeare`."""
    write_mnist(root / "MNIST" / "raw")
    write_parquet(root / "cifar10", "label", 10, 4000)
    write_parquet(root / "cifar100", "fine_label", 100, 300)
    write_plays(root / "shakespeare", {f"{client:02}": [b"to be, or not to be: " * 8] * 4 for client in range(20)})


def draw(shape: tuple[int, ...], labels: np.ndarray) -> np.ndarray:
    """Return uint8 images (labels, *shape)."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(128, size=(int(labels.max()) + 1, *shape), dtype=np.uint8)
    return pictures[labels] + rng.integers(128, size=(len(labels), *shape), dtype=np.uint8)


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    for split, labels in (("train", np.repeat(np.arange(10), MNIST)), ("t10k", np.arange(1000) % 10)):
        for kind, content in (("images-idx3", draw((28, 28), labels)), ("labels-idx1", labels)):
            (folder / f"{split}-{kind}-ubyte").write_bytes(idx(content))


def idx(content: np.ndarray) -> bytes:
    """Return a file of MNIST's format."""
    header = b"".join(number.to_bytes(4, "big") for number in (0x800 + content.ndim, *content.shape))
    return header + content.astype(np.uint8).tobytes()


def write_parquet(folder: Path, label: str, classes: int, count: int) -> None:
    for split, size in (("train", count), ("test", count // 4)):
        labels = np.arange(size) % classes
        write_images(folder / f"{split}-0.parquet", draw((32, 32, 3), labels), labels, label)


def write_images(file: Path, images: Iterable[np.ndarray], labels: ArrayLike, label: str = "label") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": encode(image), "path": None} for image in images]
    parquet.write_table(pa.table({"img": rows, label: labels}), file)


def encode(image: np.ndarray, kind: str = "BMP", **options: object) -> bytes:
    file = BytesIO()
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()


def write_plays(folder: Path, snippets: Mapping[str, list[bytes]]) -> None:
    """Write what each client says, the same to train and to test on."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        with h5py.File(folder / f"shakespeare_{split}.h5", "w") as file:
            for client, lines in snippets.items():
                file[f"examples/{client}/snippets"] = lines
