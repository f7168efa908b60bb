"""Files that are no configuration, and data that are damaged: refused in one line, with exit code 2."""

import io
import os
import struct
import sys
import time
from pathlib import Path
from threading import Thread
from zlib import crc32

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sharding import UserError
from tests.drawn import encode
from tests.train.runs import REPOSITORY, TINY, refused
from train import load_model
from train.cli.commands import main

CONFIGS = REPOSITORY / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
CIFAR = str(CONFIGS / "cifar10_small.yaml")
SHAKESPEARE = str(CONFIGS / "shakespeare_gpt.yaml")


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
FILES = {
    "empty": (b"", "the config lacks 'name'"),
    "binary": (PNG, "is not UTF-8 text (byte 0); save it as UTF-8"),
    "UTF-16": ("name: x".encode("utf-16"), "is not UTF-8 text"),
    "Latin-1": ("name: gr\xfcn".encode("latin-1"), "is not UTF-8 text (byte 8)"),
    "a list": (b"- a", "has list"),
    "a word": (b"name", "has str"),
    "deep and whole": (b"a: " + b"[" * 500 + b"]" * 500, "nested too deeply"),
    "aliases": (
        b"a0: &a0 [1, 1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 40)),
        "line 2: *a0 is an alias, which is not read; write the value itself",
    ),
    "tabs": (b"a:\n\tb: 3", "is not valid YAML"),
    "a key twice": (b"rounds: 3\nname: x\nrounds: 4\n", 'line 3: found duplicate key "rounds"'),
    "a nested key twice": (b"local: {lr: 1, lr: 2}", 'line 1: found duplicate key "lr"'),
    "a ratio twice": (b"keep_ratio: {1: 0.5, 1.0: 0.5}", 'found duplicate key "1.0"'),
    "python": (b"name: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    "two documents": (b"a: 1\n---\nb: 2", "is not valid YAML"),
    "a tag of a flag": (b"name: !!bool maybe", "it is not valid YAML"),
}


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES.keys())
def test_config_with_invalid_content_prints_one_line(capsys, content, words):
    Path("config.yaml").write_bytes(content)
    refused(capsys, ["run", "config.yaml"], words)


RUNS = {
    "empty": ("", "has NoneType"),
    "a list": ("- 1", "has list"),
    "an alias": ("a: &a []\nplugins: *a", "*a is an alias"),
    "another version": (f"{Path(QUICKSTART).read_text()}\nways: rule\n", "'ways'"),
}


@pytest.mark.parametrize(("content", "words"), RUNS.values(), ids=RUNS)
def test_run_directory_with_a_damaged_config_is_refused_in_one_line(capsys, content, words):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(content)
    refused(capsys, ["run", QUICKSTART, "output=run", "--resume"], "config.yaml cannot be read (", words)
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        load_model("run")


def test_config_through_a_pipe_is_read():
    os.mkfifo("config.yaml")
    pipe = os.open("config.yaml", os.O_RDWR)
    os.write(pipe, Path(QUICKSTART).read_bytes())
    Thread(target=lambda: (time.sleep(0.2), os.close(pipe))).start()
    assert main(["inspect", "config.yaml"]) == 0


def test_config_with_a_byte_order_mark_is_read():
    Path("config.yaml").write_bytes(b"\xef\xbb\xbf" + Path(QUICKSTART).read_bytes())
    assert main(["inspect", "config.yaml"]) == 0


def encoded(width=32):
    return encode(np.zeros((32, width, 3), np.uint8), "PNG")


def header(width, height):
    """Return how a PNG of this size begins."""
    size = b"IHDR" + struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    return PNG.removesuffix(b"IHDR") + size + struct.pack(">II", crc32(size), 100) + b"IDAT"


def table(images, labels, label_type=None):
    column = pa.array(
        [{"bytes": image, "path": None} for image in images], pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    return pa.table({"img": column, "label": pa.array(labels, label_type)})


def parquet_bytes(content):
    file = io.BytesIO()
    parquet.write_table(content, file)
    return file.getvalue()


def holed(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + b"\0" * middle + data[2 * middle :]


SOUND = parquet_bytes(table([encoded()] * 50, [0] * 50))
MANY = parquet_bytes(table([encoded() + bytes([i]) for i in range(50)], list(range(10)) * 5))
PARQUETS = {
    "garbage": (b"garbage", "train-0.parquet"),
    "cut off": (SOUND[:-20], "train-0.parquet"),
    "a hole": (holed(MANY), "train-0.parquet"),
    "no rows": (parquet_bytes(table([], [], pa.int64())), "has no rows"),
    "negative": (parquet_bytes(table([encoded()], [-1])), "the targets -1"),
    "too large": (parquet_bytes(table([encoded()], [10])), "the targets 10"),
    "no label": (
        parquet_bytes(table([encoded()] * 2, [0, None], pa.int64())),
        "1 of 2 rows have no value in the column label, the first is row 2",
    ),
    "no value": (
        parquet_bytes(pa.table({"img": [encoded(), None], "label": [0, 0]})),
        "1 of 2 rows have no value in the column img, the first is row 2",
    ),
    "no picture": (parquet_bytes(table([b"<svg/>"], [0])), "begins with b'<svg/>'"),
    "words": (parquet_bytes(table([encoded()], ["cat"])), "train-0.parquet"),
    "fractions": (parquet_bytes(table([encoded()], [0.5])), "train-0.parquet"),
    "no image": (parquet_bytes(table([None], [0])), "1 of 1 rows have no image in img"),
    "image cut off": (parquet_bytes(table([encoded()[:60]], [0])), "cannot read"),
    "sizes": (parquet_bytes(table([encoded(), encoded(width=30)], [0, 1])), "an image has 30x32 pixels"),
    "a huge image": (parquet_bytes(table([header(9000, 9000)], [0])), "an image has 9000x9000 pixels"),
    "numbers for images": (parquet_bytes(pa.table({"img": [1], "label": [0]})), "1 of 1 rows have no image in img"),
    "other columns": (parquet_bytes(pa.table({"a": [1]})), "has the columns a; expected"),
}


@pytest.mark.parametrize(("content", "words"), PARQUETS.values(), ids=PARQUETS.keys())
def test_damaged_parquet_file_prints_one_line(capsys, content, words):
    folder = Path("data/cifar10")
    folder.mkdir(parents=True)
    (folder / "train-0.parquet").write_bytes(content)
    (folder / "test-0.parquet").write_bytes(SOUND)
    refused(capsys, ["run", CIFAR, "data.root=data"], words)


def h5_bytes(fill):
    file = io.BytesIO()
    with h5py.File(file, "w") as stored:
        fill(stored)
    return file.getvalue()


def client(snippets):
    return lambda stored: stored.create_group("examples/A").create_dataset("snippets", data=snippets)


PLAY = h5_bytes(client(np.array([b"To be, or not to be"] * 50, dtype="S30")))
H5 = {
    "garbage": (b"garbage", "shakespeare_train.h5"),
    "cut off": (PLAY[:-100], "shakespeare_train.h5"),
    "no examples": (h5_bytes(lambda stored: None), "shakespeare_train.h5"),
    "no snippets": (h5_bytes(lambda stored: stored.create_group("examples/A")), "shakespeare_train.h5"),
    "no words": (h5_bytes(client(np.zeros(0, dtype="S3"))), "shakespeare_train.h5"),
    "numbers": (h5_bytes(client(np.arange(3))), "shakespeare_train.h5"),
}


@pytest.mark.parametrize(("content", "words"), H5.values(), ids=H5.keys())
def test_damaged_h5_file_prints_one_line(capsys, content, words):
    Path("shakespeare_train.h5").write_bytes(content)
    Path("shakespeare_test.h5").write_bytes(PLAY)
    refused(capsys, ["run", SHAKESPEARE, "data.root=."], words)


TREES = {
    "empty": ({}, "cannot read"),
    "no list": ({"train/n1/n1_0.JPEG": b""}, "wnids.txt"),
    "no images": ({"wnids.txt": b"n1\n", "val/val_annotations.txt": b""}, "cannot read"),
    "broken image": ({"wnids.txt": b"n1\n", "train/n1/images/n1_0.JPEG": b"x"}, "cannot read"),
    "odd name": ({"wnids.txt": b"n1\n", "train/n1/images/x.JPEG": b"x"}, "cannot read"),
}


@pytest.mark.parametrize(("files", "words"), TREES.values(), ids=TREES.keys())
def test_damaged_tiny_imagenet_prints_one_line(capsys, files, words):
    tree = Path("tiny-imagenet-200")
    tree.mkdir()
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    refused(capsys, ["run", str(CONFIGS / "tiny_imagenet_cct.yaml"), "data.root=."], words)


def test_failed_download_prints_one_line_and_leaves_no_folder(capsys, monkeypatch):
    from train.data import official

    def offline(folder, download):
        folder.mkdir(parents=True)
        print("0.0%", file=sys.stderr)
        raise OSError("no route\nto host")

    monkeypatch.setitem(official.TORCHVISION, "cifar10", offline)
    refused(
        capsys, ["run", CIFAR, "data.root=a/b", "data.download=true"], "could not download cifar10 into a/b/cifar10: no"
    )


@pytest.mark.usefixtures("undrawn")
def test_config_with_unusual_valid_values_is_accepted(capsys):
    odd = ["local.clip=.inf", "name=grün", "output=2024", "network.bandwidth=1", "local.batch_size=10000000000"]
    small = ["rounds=1", *TINY[1:], "engine=sequential"]
    assert main(["run", QUICKSTART, *odd, *small]) == 0
    assert (Path("2024") / "metrics.jsonl").exists()
    assert main(["run", QUICKSTART, "output=run #1", *small, "keep_ratio=1e-11"]) == 0
    assert Path("run #1").is_dir()
