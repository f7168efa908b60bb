"""Checkpoints: names with slashes, tied weights, checksums."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from sharding import Server, ShardPlanner, iterate_average
from train.rundir.checkpoint import Checkpoint, DamagedError
from train.rundir.model_file import save_model


def with_slashes() -> nn.Module:
    model = nn.Sequential()
    model.add_module("a/b", nn.Linear(2, 2))
    model.add_module("server/net", nn.Linear(2, 2))
    return model


def server_of(model: nn.Module) -> Server:
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    return Server(model, ShardPlanner("dense"), optimizer, iterate_average(model))


def test_checkpoint_of_a_model_whose_names_have_slashes_restores_it(tmp_path):
    model, other = with_slashes(), with_slashes()
    server, restored = server_of(model), server_of(other)
    server.round(0, {"a": 1.0}, lambda client, shard: shard.returned({k: v + 1 for k, v in shard.trained().items()}))
    path = tmp_path / "model.safetensors"
    path.write_bytes(Checkpoint.of(model, 1, {"server/net": server}).to_bytes())
    Checkpoint.read(path).restore(other, {"server/net": restored})
    for before, after in ((model, other), (server, restored)):
        torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert any(name.startswith("optimizer/SGD/a/b.weight") for name in server.state_dict())


def test_checkpoint_of_tied_weights_restores_them_tied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    path = tmp_path / "model.safetensors"
    path.write_bytes(Checkpoint.of(model, 1, {"server/net": server_of(model)}).to_bytes())
    Checkpoint.read(path).restore(other)
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)
    save_model(path, model, 1, [])
    assert {*load_file(path)} == {*model.state_dict()}


SPOILED = {
    "a part": lambda content: content[:-20],
    "zeros": lambda content: bytes(len(content)),
    "a bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "another round": lambda content: content.replace(rb"\"rounds\": 3", rb"\"rounds\": 2"),
    "no metadata": lambda content: content.replace(b"checkpoint", b"chickpoint"),
    "no checksum": lambda content: content.replace(b"checksum", b"checksun"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_checkpoint_that_is_damaged_raises(spoil, tmp_path):
    content = Checkpoint.of(nn.Linear(2, 2), 3).to_bytes()
    assert spoil(content) != content
    (tmp_path / "checkpoint").write_bytes(spoil(content))
    with pytest.raises(DamagedError):
        Checkpoint.read(tmp_path / "checkpoint")
