"""Image datasets in local folders: where to look for them, how to read them, and an error that says what is missing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sharding.errors import UserError, join_first
from train.data.cifar100_classes import coarse_labels
from train.data.dataset import EMPTY, Dataset, Split, default_root, flip, reading, standardize
from train.data.images import Images, Shape, decode, lossy_encoding
from train.data.rows import read_rows


@dataclass(frozen=True)
class Source:
    """An image dataset on disk.

    Attributes:
        folders: names its folder may have under the root; the first is the one we name and download into.
        marker: the file or folder that marks its official layout, below that folder or the root itself.
        label: label column in the parquet layout.
        num_classes: number of classes.
        shape: (channels, height, width).
        augment: random change of training batches, or None.
        samples: official numbers of training and test images.
        encoding: lossy encoding in which it was published, if any.
    """

    folders: tuple[str, ...]
    marker: str
    label: str
    num_classes: int
    shape: Shape
    augment: Callable[[Tensor, torch.Generator], Tensor] | None
    samples: tuple[int, int]
    encoding: str = ""

    def remarks(self, train: Images, test: Images) -> tuple[str, ...]:
        """Describe how these images differ from the official ones."""
        remarks = [
            f"{len(split.targets):,} of {official:,} {name} images"
            for split, official, name in zip((train, test), self.samples, ("training", "test"), strict=True)
            if len(split.targets) != official
        ]
        lossy = {images.lossy for images in (train, test)} - {"", self.encoding}
        return (*(f"a lossy re-encoding ({encoding})" for encoding in sorted(lossy)), *remarks)


SOURCES = {
    "cifar10": Source(("cifar10",), "cifar-10-batches-py", "label", 10, (3, 32, 32), flip, (50_000, 10_000)),
    "cifar100": Source(("cifar100",), "cifar-100-python", "fine_label", 100, (3, 32, 32), flip, (50_000, 10_000)),
    "mnist": Source(("mnist",), "MNIST/raw", "label", 10, (1, 28, 28), None, (60_000, 10_000)),
    "tiny_imagenet": Source(
        ("tiny_imagenet", "tiny_imagenet_subset"),
        "tiny-imagenet-200",
        "label",
        200,
        (3, 64, 64),
        flip,
        (100_000, 10_000),
        encoding="JPEG",
    ),
}


def load_images(name: str, root: str | Path | None = None, download: bool = False) -> Dataset:
    """Load the images from `root`, in Hugging Face's parquet layout or the official one.

    Args:
        name: a key of `SOURCES`.
        root: folder that holds the dataset's own folder; by default `default_root()`.
        download: fetch what is missing, into `root`.

    Raises:
        UserError: no such data, and not downloaded; or its images are not of the expected kind.
    """
    root = default_root() if root is None else Path(root)
    train, test = (_read(name, root, training, download) for training in (True, False))
    return replace(
        empty_images(name),
        train=Split(train.inputs, train.targets),
        test=Split(test.inputs, test.targets),
        coarse=coarse_labels() if name == "cifar100" else None,
        remarks=SOURCES[name].remarks(train, test),
    )


def empty_images(name: str, **_: object) -> Dataset:
    """Return an image dataset without its samples."""
    source = SOURCES[name]
    return Dataset(name, EMPTY, EMPTY, source.num_classes, source.shape, standardize, source.augment)


def _read(name: str, root: Path, training: bool, download: bool) -> Images:
    """Read one split from the first place that has it."""
    source = SOURCES[name]
    for folder_name in source.folders:
        for split in ("train",) if training else ("test", "valid"):
            if shards := sorted((root / folder_name).rglob(f"{split}*.parquet")):  # `train-00000-of-00002….parquet`
                return read_parquet(shards, source.label, source.shape)
    from train.data import official  # noqa: PLC0415 - torchvision is heavy

    target = root / source.folders[0]
    folder = next((path for path in (target, root) if (path / source.marker).exists()), None)
    if folder is None:
        if not download:
            raise UserError(_missing(name, root))
        official.download(name, target)
        folder = target
    with reading(folder):
        return official.read_official(name, folder, training)


def read_parquet(files: Sequence[Path], label: str, shape: Shape) -> Images:
    """Read the shards of one split in Hugging Face's layout, of one row per image.

    Args:
        files: The shards, in order.
        label: The name of the column of labels; the images are in the column `img` or `image`.
        shape: (channels, height, width); other colors are converted, other sizes are refused.

    Raises:
        UserError: a file is damaged or empty, lacks a column, has labels that are not numbers, or images that cannot
            be decoded or have another size.
    """
    from pyarrow import parquet  # noqa: PLC0415 - heavy

    with reading(files[0]):
        names = parquet.read_schema(files[0]).names
    image = next((name for name in ("img", "image") if name in names), None)
    if image is None or label not in names:
        raise UserError(f"{files[0]} has the columns {join_first(names)}; expected img or image, and {label}")
    rows = read_rows("root", files, {"image": image, "label": label}, None, "utf-8")
    encoded, place = rows.images(image, files[0].parent)
    numbers = {word: number for number, word in enumerate(rows.classes.get(label, ()))}
    with reading(rows.source):
        targets = torch.tensor([numbers[name] if numbers else int(name) for name in rows.names(label)])
    return Images(decode(encoded, shape, place=place), targets, next(filter(None, map(lossy_encoding, encoded)), ""))


def _missing(name: str, root: Path) -> str:
    """Return an error that says where we looked, what belongs there, and what to do."""
    source = SOURCES[name]
    places = " or ".join(f"{folder}/train-*.parquet" for folder in source.folders)
    fetch = "" if name == "tiny_imagenet" else ", or data.download=true to fetch it"
    return (
        f"no {name} under {root.resolve()}: expected {places}, with test-* or valid-* beside it, or "
        f"{source.marker}/; set data.root=… to the folder that holds it{fetch}"
    )
