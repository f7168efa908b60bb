"""The program among other people's settings: a notebook's variables, proxies, small machines, packages of our names."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sharding.errors import UserError
from tests.drawn import encode
from tests.train.runs import REPOSITORY
from train.config.registries import import_parts
from train.data.images import read_parquet
from train.data.shakespeare import load_shakespeare


def command(folder, *words, **variables):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    line = [sys.executable, "-m", "train", *words]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_command_with_the_backend_of_a_notebook_runs(tmp_path):
    backend = "module://a_backend_that_is_not_installed"
    done = command(tmp_path, "config", str(REPOSITORY / "configs/quickstart.yaml"), MPLBACKEND=backend)
    assert done.returncode == 0, done.stderr


def test_command_where_another_models_comes_first_names_it(tmp_path):
    (tmp_path / "models.py").write_text("")
    done = command(tmp_path, "list")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/models.py is in the way of our package models; rename or move it\n"


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


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_read_parquet_with_a_binary_column_reads_it(tmp_path, kind):
    column = pa.array([encode(image, "PNG") for image in IMAGES], kind)
    parquet.write_table(pa.table({"img": column, "label": [0, 1]}), tmp_path / "a.parquet")
    images = read_parquet([tmp_path / "a.parquet"], "label", (3, 4, 4))
    assert (images.inputs.permute(0, 2, 3, 1).numpy() == IMAGES).all()


def test_load_shakespeare_with_an_empty_client_gives_it_no_samples(tmp_path):
    for name in ("train", "test"):
        with h5py.File(tmp_path / f"shakespeare_{name}.h5", "w") as stored:
            stored["examples/A/snippets"] = np.zeros(0, dtype="S3")
            stored["examples/B/snippets"] = np.array([b"To be"])
    assert [len(indices) for indices in load_shakespeare(tmp_path).natural] == [0, 1]
