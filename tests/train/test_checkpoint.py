"""What stands beside the model in a checkpoint is never taken for a part of it."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sharding import ServerOptimizer, iterate_average
from train.rundir.checkpoint import Checkpoint, SpoiledError
from train.rundir.model_file import save_model


def with_slashes() -> nn.Module:
    model = nn.Sequential()
    model.add_module("a/b", nn.Linear(2, 2))
    model.add_module("server/net", nn.Linear(2, 2))
    return model


def test_a_model_whose_names_have_slashes_comes_back(tmp_path):
    model = with_slashes()
    server, average = ServerOptimizer(model, "momentum"), iterate_average(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    server.step()
    average.update_parameters(model)
    path = tmp_path / "model.safetensors"
    path.write_bytes(Checkpoint.of(model, 1, None, {"server/net": server, "average/net": average}).to_bytes())

    other = with_slashes()
    keepers = {"server/net": ServerOptimizer(other, "momentum"), "average/net": iterate_average(other)}
    checkpoint = Checkpoint.read(path)
    checkpoint.restore(other, None, keepers)
    for held, kept in ((model, other), (server, keepers["server/net"]), (average, keepers["average/net"])):
        torch.testing.assert_close(kept.state_dict(), held.state_dict(), rtol=0, atol=0)


def test_a_model_with_tied_weights_comes_back_tied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    keepers = {"server/net": ServerOptimizer(model, "momentum"), "average/net": iterate_average(model)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(Checkpoint.of(model, 1, None, keepers).to_bytes())
    Checkpoint.read(path).restore(other)
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)
    save_model(path, model, 1, {})
    assert {*load_file(path)} == {*model.state_dict()}


def test_a_checkpoint_without_a_checksum_is_spoiled(tmp_path):
    content = Checkpoint.of(nn.Linear(2, 2), 1).to_bytes()
    (tmp_path / "checkpoint").write_bytes(content.replace(b"checksum", b"checksun"))
    with pytest.raises(SpoiledError, match="checksum"):
        Checkpoint.read(tmp_path / "checkpoint")
