"""The program among other people's settings: a notebook's variables, proxies, small machines, packages of our names."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from sharding import UserError
from tests.drawn import encode
from tests.train.runs import REPOSITORY
from train.data.images import decode, shape_of
from train.data.shakespeare import load_shakespeare
from train.data.vision import read_parquet
from train.registries import import_parts


def command(folder, *words, program=("-m", "train"), **variables):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    line = [sys.executable, *program, *words]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


PICTURES = ["docs/pictures/result.py", "docs/pictures/round.py"]
SCRIPTS = ["docs/generate.py", *PICTURES, "examples/inclusion_probabilities.py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_with_the_backend_of_a_notebook_runs(tmp_path, script):
    done = command(tmp_path, "--help", program=(str(REPOSITORY / script),), MPLBACKEND="inline")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "backend", ["module://a_backend_that_is_not_installed", pytest.param("inline", marks=pytest.mark.slow)]
)
def test_command_with_the_backend_of_a_notebook_where_packages_of_our_names_come_first_runs(tmp_path, backend):
    for name in ("models", "sharding", "examples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    words = ("config", str(REPOSITORY / "configs/quickstart.yaml"), "--import", "examples.own_strategy")
    done = command(tmp_path, *words, MPLBACKEND=backend)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_of_a_module_of_another_package_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"the package taken is that of {tmp_path}/taken/__init__.py"):
        import_parts(["taken.strategy"])


IMAGES = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)


def test_read_parquet_with_two_formats_reads_both(tmp_path):
    files = [encode(IMAGES[0], "PNG"), encode(IMAGES[1], "JPEG")]
    column = pa.array([{"bytes": file} for file in files])
    parquet.write_table(pa.table({"img": column, "label": [0, 1]}), tmp_path / "a.parquet")
    images = read_parquet([tmp_path / "a.parquet"], "label", (3, 4, 4))
    assert (images.inputs[0].permute(1, 2, 0).numpy() == IMAGES[0]).all()
    assert len(images.inputs) == 2
    assert images.lossy == "JPEG"


BINARY = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]


@pytest.mark.parametrize("kind", BINARY, ids=str)
def test_read_parquet_with_a_binary_column_reads_it(tmp_path, kind):
    column = pa.array([encode(image, "PNG") for image in IMAGES], pa.binary()).cast(kind)
    parquet.write_table(pa.table({"img": column, "label": [0, 1]}), tmp_path / "a.parquet")
    images = read_parquet([tmp_path / "a.parquet"], "label", (3, 4, 4))
    assert (images.inputs.permute(0, 2, 3, 1).numpy() == IMAGES).all()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_decode_of_16_bits_keeps_the_upper_8(format):
    values = np.array([[0, 255, 256], [30000, 65280, 65535]], dtype=np.uint16)
    file = encode(values, format)
    assert shape_of(file) == (1, 2, 3)
    assert decode([file], (1, 2, 3)).squeeze().tolist() == [[0, 0, 1], [117, 255, 255]]
    with pytest.raises(ValueError, match="values of 32 bits"):
        decode([encode(values.astype(np.float32), "TIFF")], (1, 2, 3))


@pytest.mark.parametrize("orientation", [0, *range(1, 10)])  # 0 and 9 mean nothing
def test_decode_of_a_photo_turns_it_upright(orientation):
    pixels = np.zeros((16, 32), dtype=np.uint8)
    pixels[:8, :8] = 255
    upright = [pixels, pixels[:, ::-1], pixels[::-1, ::-1], pixels[::-1], pixels.T]
    upright += [pixels[::-1].T, pixels.T[::-1, ::-1], pixels[:, ::-1].T]
    expected = upright[orientation - 1] if 1 <= orientation <= 8 else pixels
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encode(pixels, "PNG", exif=exif)
    assert shape_of(file) == (1, *expected.shape)
    assert (decode([file], (1, *expected.shape)).squeeze().numpy() == expected).all()


def test_decode_of_an_image_with_damaged_exif_leaves_it_as_it_is():
    file = encode(IMAGES[0], "PNG", exif=b"Exif\0\0no exif")
    assert (decode([file], (3, 4, 4))[0].permute(1, 2, 0).numpy() == IMAGES[0]).all()


def test_load_shakespeare_with_an_empty_client_gives_it_no_samples(tmp_path):
    for name in ("train", "test"):
        with h5py.File(tmp_path / f"shakespeare_{name}.h5", "w") as stored:
            stored["examples/A/snippets"] = np.zeros(0, dtype="S3")
            stored["examples/B/snippets"] = np.array([b"To be"])
    assert [len(indices) for indices in load_shakespeare(tmp_path).natural] == [0, 1]
