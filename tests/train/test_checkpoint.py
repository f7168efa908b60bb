"""What stands beside the model in a checkpoint is never taken for a part of it."""

import torch
from torch import nn

from sharding import ServerOptimizer, iterate_average
from train.rundir.checkpoint import Checkpoint


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
        one, two = held.state_dict(), kept.state_dict()
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
