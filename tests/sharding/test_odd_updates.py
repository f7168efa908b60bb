"""Unusual updates: dtypes without arithmetic, variances below 0, clients that changed nothing."""

import pytest
import torch
from torch import nn

from sharding import ShardPlanner
from sharding.rounds.norms import update_norm
from tests.sharding.models import aggregate, unchanged


def plan_for(model, clients=3):
    return ShardPlanner("dense").plan(model, dict.fromkeys(range(clients), 1.0))


def shifted(shard, by, only=""):
    return shard.returned({name: tensor + by * (only in name) for name, tensor in shard.trained().items()})


def test_update_with_a_negative_variance_is_rejected():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    plan = plan_for(model)
    corrupted = shifted(plan.shard(1), -4.0, "running_var")
    updates = {client: unchanged(shard) for client, shard in plan.shards()} | {1: corrupted}
    outcome = aggregate(model, plan, updates, dict.fromkeys(plan, 1.0))
    assert outcome.accepted == [0, 2]
    assert "running_var" in outcome.rejected[1].message


def test_update_norm_is_without_running_statistics():
    shard = plan_for(nn.BatchNorm1d(2)).shard(0)
    assert update_norm(shard, shifted(shard, 3.0, "running_")) == 0
    assert update_norm(shard, shifted(shard, 3.0, "weight")) == pytest.approx(18**0.5)


def test_sampled_average_with_a_negative_variance_clamps_it_to_zero():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    plan = plan_for(model)
    smaller = {client: shifted(shard, -0.5, "running_var") for client, shard in plan.shards()}
    aggregate(model, plan, smaller, dict.fromkeys(plan, 1.0), total=len(plan) / 3)  # three times the way
    assert model[1].running_var.tolist() == [0.0, 0.0]
    assert bool(model.eval()(torch.ones(1, 3)).isfinite().all())


@pytest.mark.parametrize("compression", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("total", "moved"), [(None, 2.0), (4.0, 1.0)])
def test_average_of_float8_buffers_moves_them(compression, total, moved):
    model = nn.Linear(3, 2)
    model.register_buffer("scale", torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn))
    plan = ShardPlanner("dense", compression=compression).plan(model, {0: 1.0, 1: 1.0})
    updates = {
        client: shard.returned(shard.trained() | {"scale": shard.whole["scale"].float() + 2})
        for client, shard in plan.shards()
    }
    outcome = aggregate(model, plan, updates, dict.fromkeys(plan, 1.0), total)
    assert outcome.accepted == [0, 1]
    assert model.scale.float().tolist() == [1.0 + moved, 2.0 + moved]
