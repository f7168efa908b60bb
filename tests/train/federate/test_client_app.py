import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sharding import Shard, UserError
from sharding.rounds.codec import Terms
from train.data import DATASETS, Dataset, Split, empty_dataset, load_dataset
from train.experiment.assembly import assemble, make_model
from train.federate.client_app import open_data, partition_of, read_data
from train.federate.messages import config_text, read_config
from train.federate.server_app import config_for_nodes

ROOT = Path(__file__).parents[3]


def write(path, inputs, targets):
    safetensors.torch.save_file({"inputs": inputs, "targets": targets}, path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.slow  # the large model is built
def test_node_peak_memory_is_below_the_dense_model(config, tmp_path):
    digits = load_dataset("digits")
    write(tmp_path / "data", digits.train.inputs[:32], digits.train.targets[:32])
    words = [str(tmp_path / "data")]
    for width in (64, 6000):
        ours = config(f"model.hidden=[{width}, {width}]")
        model = make_model(ours, digits)
        shard_of(model, width, num_terms=width // 50 + 1).write(tmp_path / str(width))
        words += [config_text(ours), str(tmp_path / str(width))]
    dense = sum(parameter.nbytes for parameter in model.parameters())
    command = [sys.executable, "-m", "tests.train.federate.peak", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after - before < 0.6 * dense  # shard, model, gradients, momentum, and the bytes of a message each way
    print(f"{(after - before) / 1e6:.0f} MB more for a model of {dense / 1e6:.0f} MB")


def shard_of(model, width, num_terms):
    """Return a shard of a perceptron of two layers of this width, of any terms: an SVD would take minutes."""
    terms = Terms(torch.arange(num_terms), *torch.randn(2, width, num_terms) / width, torch.ones(num_terms))
    dense = {name: value for name, value in model.state_dict().items() if name != "3.weight"}
    return Shard({"3": terms}, dense, keep_ratio=num_terms / width)


def test_node_with_a_data_file_reads_no_dataset(config, tmp_path):
    data = Split(torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8), torch.arange(5))
    write(tmp_path / "own", data.inputs, data.targets)
    dataset, got = open_data(
        config("data=mnist", "data.root=/nowhere"), {"partition-id": 2, "data": str(tmp_path / "own")}
    )
    assert torch.equal(got.inputs, data.inputs)
    assert torch.equal(got.targets, data.targets)
    assert dataset.num_classes == 10
    assert not len(dataset.train)


def test_node_with_samples_unlike_the_dataset_raises(config, tmp_path):
    for size, target in ((16, 0), (8, 10)):
        write(tmp_path / "own", torch.zeros(1, 1, size, size, dtype=torch.uint8), torch.tensor([target]))
        with pytest.raises(UserError, match=f"data={tmp_path / 'own'} has"):
            open_data(config(), {"partition-id": 2, "data": str(tmp_path / "own")})


def test_node_with_its_own_csv_file_has_the_classes_of_the_server(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "own.csv").write_text("text,label\na b,z\nb,x\n")
    data = f"data={{name: files, test: absent.csv, tokenizer: {tmp_path / 'tokenizer'}, max_length: 4}}"
    node = {"partition-id": 2, "data": str(tmp_path / "own.csv")}
    dataset, samples = open_data(config(data, "data.classes=[x, y, z]"), node)
    assert samples.inputs.tolist() == [[2, 5, 6, 3], [2, 6, 3, 0]]
    assert samples.targets.tolist() == [2, 0]
    assert (dataset.num_classes, dataset.input_shape, len(dataset.train)) == (3, (4,), 0)
    with pytest.raises(UserError, match=r"may lack classes that others have; set data\.classes"):
        open_data(config(data), node)


def test_node_with_its_own_images_has_the_shape_that_the_server_names(config, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("x/a.png", "y/b.png"):
        (tmp_path / name).parent.mkdir()
        image.new("L", (8, 8), 9).save(tmp_path / name)
    test = Split(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    ours = config("data={name: files, test: absent, classes: [x, y]}")
    sent = config_text(config_for_nodes(ours, Dataset("files", test, test, 2, (3, 8, 8))))
    dataset, samples = open_data(read_config(sent), {"partition-id": 0, "data": str(tmp_path)})
    assert dataset.input_shape == (3, 8, 8)
    assert samples.inputs[0, :, 0, 0].tolist() == [9, 9, 9]


def test_node_without_a_file_has_the_samples_of_a_simulation(config):
    ours = config()
    clients = assemble(ours).job.clients
    _, got = open_data(ours, {"partition-id": 2})
    assert torch.equal(got.inputs, clients[2].inputs)
    with pytest.raises(UserError, match="clients 0 to 3"):
        open_data(ours, {"partition-id": 4})


def test_node_with_an_invalid_data_file_raises(tmp_path):
    (tmp_path / "garbage").write_bytes(b"\x00" * 100)
    write(tmp_path / "uneven", torch.zeros(3, 2), torch.zeros(2))
    write(tmp_path / "scalars", torch.tensor(1.0), torch.tensor(1))
    for name in ("garbage", "uneven", "scalars", "absent"):
        with pytest.raises(UserError, match=f"data={tmp_path / name}"):
            read_data(tmp_path / name)
    with pytest.raises(UserError, match="partition-id=None"):
        partition_of({})


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"files"}))  # which has no facts without its files
def test_empty_dataset_has_the_metadata(name):
    dataset = empty_dataset(name)
    assert dataset.name == name
    assert len(dataset.train) == len(dataset.test) == 0


@pytest.mark.parametrize("name", ["digits", "mine"])
def test_empty_dataset_equals_the_metadata_of_the_loaded_one(name, monkeypatch):
    monkeypatch.setitem(DATASETS, "mine", lambda: load_dataset("digits"))
    with_samples, without = load_dataset(name), empty_dataset(name)
    assert len(without.train) == len(without.test) == 0
    for key in ("num_classes", "input_shape", "prepare", "augment", "ignore_index"):
        assert getattr(with_samples, key) == getattr(without, key)
