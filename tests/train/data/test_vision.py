"""Image datasets: synthetic files of each layout, pixel by pixel, and a few rows of the real ones."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sharding import UserError
from tests.drawn import encode, idx, write_images
from train.data import load_dataset
from train.data.cifar100_classes import coarse_labels
from train.data.images import Images, lossy_encoding
from train.data.vision import SOURCES

RNG = np.random.default_rng(0)


@pytest.fixture
def cifar10(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Three training shards with 700, 1 and 2 rows, in the folder that the hub uses, and a test shard."""
    pixels = RNG.integers(256, size=(703, 32, 32, 3), dtype=np.uint8)
    labels = [row % 10 for row in range(703)]
    folder = tmp_path / "cifar10" / "plain_text"
    for shard, (start, stop) in enumerate([(0, 700), (700, 701), (701, 703)]):
        file = folder / f"train-{shard:05}-of-00003.parquet"
        write_images(file, pixels[start:stop], labels[start:stop])
    write_images(folder / "test-00000-of-00001.parquet", pixels[:2], [3, 4])
    return tmp_path, pixels


def test_cifar10_of_parquet_files_equals_their_pixels_in_order(cifar10: tuple[Path, np.ndarray]) -> None:
    root, pixels = cifar10
    data = load_dataset("cifar10", root=root)
    assert torch.equal(data.train.inputs, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert data.train.targets.tolist() == [row % 10 for row in range(703)]
    assert data.test.targets.tolist() == [3, 4]
    assert data.train.inputs.is_contiguous()
    assert (data.input_shape, data.num_classes, data.ignore_index) == ((3, 32, 32), 10, -100)
    assert data.augment is not None


def test_cifar10_of_fewer_images_has_remarks(cifar10: tuple[Path, np.ndarray]) -> None:
    data = load_dataset("cifar10", root=cifar10[0])
    assert data.remarks == ("703 of 50,000 training images", "2 of 10,000 test images")

    def images(count: int, lossy: str = "") -> Images:
        return Images(torch.zeros(0), torch.zeros(count), lossy)

    assert SOURCES["cifar10"].remarks(images(50_000), images(10_000)) == ()
    assert SOURCES["cifar10"].remarks(images(50_000, "WebP"), images(10_000)) == ("a lossy re-encoding (WebP)",)
    assert SOURCES["tiny_imagenet"].remarks(images(100_000, "JPEG"), images(10_000, "JPEG")) == ()


def test_lossy_image_encodings_are_recognized() -> None:
    pixels = RNG.integers(256, size=(8, 8, 3), dtype=np.uint8)
    files = [*(encode(pixels, kind) for kind in ("PNG", "JPEG", "WEBP")), encode(pixels, "WEBP", lossless=True)]
    assert [lossy_encoding(file) for file in files] == ["", "JPEG", "WebP", ""]


def test_images_of_another_mode_are_converted(tmp_path: Path) -> None:
    gray = RNG.integers(256, size=(28, 28), dtype=np.uint8)
    color = np.repeat(gray[..., None], 3, axis=2)
    for split in ("train", "test"):
        write_images(tmp_path / "mnist" / f"{split}-0.parquet", [gray, color], [0, 1])
    data = load_dataset("mnist", root=tmp_path)
    assert torch.equal(data.train.inputs, torch.from_numpy(np.stack([gray, gray]))[:, None])
    assert data.train.inputs.stride() == torch.empty(2, 1, 28, 28).stride()  # kernels, and so bits, depend on it
    assert data.augment is None


def test_cifar100_superclasses_are_the_official_ones() -> None:
    """Checked against the labels that come with the official files, class 0 (apple) to class 99 (worm)."""
    official = (
        "4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 6 13 15 3 15 0 11 1 10 12 14 16 "
        "9 11 5 5 19 8 8 15 13 14 17 18 10 16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10 "
        "0 1 16 12 9 13 15 13 16 19 2 4 6 19 5 5 8 19 18 1 2 15 6 0 17 8 14 13"
    )
    assert coarse_labels().tolist() == [int(label) for label in official.split()]


def test_mnist_of_official_files_equals_their_pixels(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = RNG.integers(256, size=(3, 28, 28), dtype=np.uint8)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(pixels))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.array([5, 0, 4])))
    data = load_dataset("mnist", root=tmp_path)
    assert torch.equal(data.train.inputs, torch.from_numpy(pixels[:, None]))
    assert data.train.targets.tolist() == [5, 0, 4]


def test_cifar10_of_official_files_equals_their_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name: str, content: dict) -> tuple[str, str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return name, hashlib.md5((folder / name).read_bytes()).hexdigest()

    pixels = RNG.integers(256, size=(2, 3, 32, 32), dtype=np.uint8)
    batch = write("batch", {"data": pixels.reshape(2, -1), "labels": [7, 1]})
    meta = write("meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(CIFAR10, "train_list", [batch])
    monkeypatch.setattr(CIFAR10, "test_list", [batch])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    data = load_dataset("cifar10", root=tmp_path)
    assert torch.equal(data.train.inputs, torch.from_numpy(pixels))
    assert data.train.targets.tolist() == [7, 1]
    (folder / "batch").write_bytes(b"cut short")
    with pytest.raises(UserError, match=f"incomplete files under {tmp_path}"):
        load_dataset("cifar10", root=tmp_path)


def test_tiny_imagenet_of_official_files_equals_their_pixels(tmp_path: Path) -> None:
    tree = tmp_path / "tiny-imagenet-200"
    (tree / "val" / "images").mkdir(parents=True)
    (tree / "wnids.txt").write_text("n2\nn1\n")
    shades = {("n1", 0): 10, ("n1", 1): 20, ("n1", 10): 30, ("n2", 0): 40}
    for (name, number), shade in shades.items():
        (tree / "train" / name / "images").mkdir(parents=True, exist_ok=True)
        file = tree / "train" / name / "images" / f"{name}_{number}.JPEG"
        file.write_bytes(encode(np.full((64, 64, 3), shade, np.uint8), "JPEG"))
    (tree / "val" / "images" / "val_0.JPEG").write_bytes(encode(np.full((64, 64), 50, np.uint8), "JPEG"))
    (tree / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn2\t0\t0\t62\t62\n")
    data = load_dataset("tiny_imagenet", root=tmp_path)
    assert data.train.inputs[:, 0, 0, 0].tolist() == [10, 40, 20, 30]
    assert data.train.targets.tolist() == [0, 1, 0, 0]
    assert data.test.inputs[0, :, 5, 5].tolist() == [50, 50, 50]
    assert data.test.targets.tolist() == [1]


@pytest.mark.real
@pytest.mark.parametrize("name", SOURCES)
def test_real_images_have_the_known_pixels(name: str, real_data: Callable[..., Path]) -> None:
    source = SOURCES[name]
    root = real_data(*source.folders)
    data = load_dataset(name, root=root)
    assert data.train.inputs.shape[1:] == source.shape
    first = slice(2 * source.num_classes)
    assert torch.bincount(data.train.targets[first]).tolist() == [2] * source.num_classes  # any prefix is balanced
    assert torch.bincount(data.test.targets[first]).tolist() == [2] * source.num_classes
    assert 40 < data.train.inputs.float().std() < 120
    assert ("a lossy re-encoding (WebP)" in data.remarks) == (name != "mnist")
    assert (data.coarse is not None) == (name == "cifar100")
    ready = data.prepare(data.train.inputs)
    assert ready.isfinite().all()
