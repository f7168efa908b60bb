"""`Server.round` against its steps, and the state that the server keeps between rounds."""

from math import nan

import pytest
import torch
from torch import nn
from torch.optim import SGD

from sharding import Server, ShardPlanner, UserError, factorize, iterate_average, train_shard
from tests.sharding.models import aggregate, unchanged

RATIOS = {"phone": 0.25, "laptop": 0.5}
SAMPLES = {"phone": 3.0, "laptop": 1.0}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def train(client, shard):
    generator = torch.Generator().manual_seed(len(client))
    inputs = torch.randn(12, 6, generator=generator)
    return train_shard(make_model(), shard, [(inputs, inputs[:, :3].argmax(1))], lr=0.1)


def test_server_round_equals_plan_train_aggregate_and_step():
    server, model, planner = Server(make_model(), ShardPlanner("collective")), make_model(), ShardPlanner("collective")
    for t in range(3):
        outcome = server.round(t, RATIOS, train, SAMPLES)
        plan = planner.plan(model, RATIOS, t)
        aggregate(model, plan, {client: train(client, shard) for client, shard in plan.shards()}, SAMPLES)
        assert outcome.accepted == list(RATIOS)
    torch.testing.assert_close(server.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_server_round_without_num_samples_weighs_clients_equally():
    alike, given = (Server(make_model(), ShardPlanner("top_n")) for _ in range(2))
    alike.round(0, RATIOS, train)
    given.round(0, RATIOS, train, dict.fromkeys(RATIOS, 7.0))
    assert torch.equal(alike.model[4].weight, given.model[4].weight)
    plan = alike.plan(RATIOS, 1)
    averages = alike.average(plan), alike.average(plan, dict.fromkeys(RATIOS, 7.0)), alike.average_as_reported(plan)
    for client, shard in plan.shards():
        for average in averages:
            average.add(client, train(client, shard), 2.0)  # a weight that is read only as reported
    changes = [average.finish()[0] for average in averages]
    assert all(torch.equal(value, other[name]) for other in changes for name, value in changes[0].items())
    given.round(1, RATIOS, train, SAMPLES)
    alike.round(1, RATIOS, train)
    assert not torch.equal(alike.model[4].weight, given.model[4].weight)


def test_server_chooses_and_checks_its_layers_once(monkeypatch):
    server, chosen = Server(make_model(), ShardPlanner("top_n")), []
    monkeypatch.setattr(ShardPlanner, "checked_layers", lambda planner, model: chosen.append(model))
    for t in range(2):
        server.round(t, RATIOS, train)
    assert chosen == []


@pytest.mark.parametrize("start", [make_model, lambda: factorize(make_model(), 0.5)], ids=["dense", "factorized"])
def test_server_plan_of_a_weight_that_became_nan_or_of_a_replaced_layer_raises(start):
    server = Server(start(), ShardPlanner("top_n"))
    with torch.no_grad():
        next(server.model[2].parameters())[1] = nan
    with pytest.raises(UserError, match="layer 2: its weight has NaN or Inf"):
        server.plan(RATIOS, 0)
    server.model[2] = nn.Linear(8, 8)
    with pytest.raises(UserError, match="2 was replaced since the server was made; make a new server"):
        server.plan(RATIOS, 0)


def test_server_without_sharded_layers_warns_once():
    with pytest.warns(UserWarning, match="no layer of this Linear is sharded") as caught:
        server = Server(nn.Linear(3, 2), ShardPlanner("top_n"))
    assert caught[0].filename == __file__
    server.plan(RATIOS, 0)


@pytest.mark.parametrize("samples", [{}, {"Phone": 3.0, "laptop": 1.0}], ids=str)
def test_server_round_with_samples_of_other_clients_raises_before_training(samples):
    with pytest.raises(UserError, match="num_samples lacks phone"):
        Server(make_model(), ShardPlanner("top_n")).round(0, RATIOS, None, samples)


def test_server_round_does_not_move_what_was_frozen_after_training():
    model = make_model()
    model(torch.ones(2, 6)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    Server(model, ShardPlanner("top_n")).round(0, RATIOS, lambda client, shard: shard.returned(shard.trained()))
    assert torch.equal(model[0].weight, before)


def test_server_round_steps_the_optimizer_and_average_once():
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.5)
    server = Server(model, ShardPlanner("dense"), optimizer, iterate_average(model))
    before = model[4].weight.detach().clone()
    server.round(0, RATIOS, train)
    assert torch.equal(server.result[4].weight, model[4].weight), "the average of one model is that model"
    plain = Server(make_model(), ShardPlanner("dense"))
    plain.round(0, RATIOS, train)
    expected = before + 0.5 * (plain.model[4].weight - before)
    torch.testing.assert_close(model[4].weight, expected)
    server.round(1, RATIOS, train)
    assert not torch.equal(server.result[4].weight, model[4].weight)
    assert plain.result is plain.model


def test_server_round_after_load_state_dict_starts_from_it():
    model = make_model()
    server = Server(model, ShardPlanner("dense"), SGD(model.parameters(), 0.4, 0.8, nesterov=True))
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    assert server.round(0, RATIOS, lambda client, shard: unchanged(shard)).accepted == list(RATIOS)
    torch.testing.assert_close(dict(model.state_dict()), loaded)
