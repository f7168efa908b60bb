"""Contents of shards: sizes, reproducibility, independence of order, and the distribution of draws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sharding import (
    DESIGNS,
    STRATEGIES,
    Allocation,
    Frozen,
    Server,
    Shard,
    ShardPlanner,
    Strategy,
    UserError,
    client_model,
    factorize,
    init_empty,
)
from sharding.rng import generator
from sharding.terms.designs import fit
from sharding.terms.strategies import num_terms
from tests.sharding.models import make_net, make_plan, spectra_of

PYTHON_DESIGNS = [name for name in DESIGNS if not name.startswith("r_")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_of_any_strategy_sends_the_terms_of_the_keep_ratio(strategy):
    model = make_net()
    plan = make_plan(model, {"a": 0.25, "b": 0.5}, strategy)
    assert list(plan) == ["a", "b"]
    for client, ratio in {"a": 0.25, "b": 0.5}.items():
        shard = plan.shard(client)
        ratio = {"full": 1.0}.get(strategy, ratio)
        assert set(shard.terms) == (set() if strategy == "dense" else {"1", "4", "6"})
        assert shard.keep_ratio == (1.0 if strategy == "dense" else ratio)
        for name, terms in shard.terms.items():
            rank = min(model.get_submodule(name).weight.flatten(1).shape)
            n = num_terms(rank, ratio)
            assert terms.indices.shape == terms.multipliers.shape == (n,)
            assert terms.u.shape[1] == terms.v.shape[1] == n
            assert terms.indices.diff().gt(0).all()


def test_a_keep_ratio_in_float32_counts_as_the_same_decimal():
    given = {0: np.float32(0.2), 1: 0.2, 2: np.float16(0.3)}
    expected, plan = (make_plan(make_net(), ratios, "prism") for ratios in ({0: 0.2, 1: 0.2, 2: 0.3}, given))
    assert plan.groups == expected.groups
    assert [shard.to_bytes() for _, shard in plan.shards()] == [shard.to_bytes() for _, shard in expected.shards()]
    planner = ShardPlanner("prism")
    assert planner.template(make_net(), given[0]).keep_ratio == planner.template(make_net(), 0.2).keep_ratio


@pytest.mark.parametrize("design", PYTHON_DESIGNS)
def test_plan_of_any_design_draws_by_the_keyed_generator(design):
    plan = ShardPlanner("unbiased", design, seed=3).plan(make_net(), {0: 0.5, 1: 0.5}, 2)
    for (_, name), draw in plan.draws.items():
        fitted = fit(draw.allocation.inclusion, design)
        expected = [fitted.draw(generator(3, "draw", 2, client, name)) for client in (0, 1)]
        np.testing.assert_array_equal(draw.indices, expected)
        for client, shard in plan.shards():
            np.testing.assert_array_equal(shard.terms[name].indices, expected[client])
            multipliers = 1 / draw.allocation.inclusion[expected[client]]
            np.testing.assert_allclose(shard.terms[name].multipliers, multipliers, rtol=1e-6)


def test_strategy_that_writes_to_the_magnitudes_raises():
    def scaled(layer):
        layer.magnitudes[:] = 1
        raise AssertionError

    with pytest.raises(ValueError, match="read-only"):
        ShardPlanner(Strategy("scaled", scaled)).plan(make_net(), {0: 0.5})


def test_plan_with_float32_inclusion_draws_the_right_number():
    def even(layer):
        pi = np.full(len(layer.magnitudes), layer.num_terms / len(layer.magnitudes), np.float32)
        return Allocation(pi, 1 / pi)

    model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 4))
    assert len(ShardPlanner(Strategy("even", even)).plan(model, {0: 0.333}).shard(0).terms["1"].indices) == 100


def test_plan_terms_equal_those_of_the_spectrum():
    model = make_net()
    plan = make_plan(model, {0: 0.5, 1: 0.25})
    for name, spectrum in spectra_of(model, plan).items():
        distinct = plan.spectra[name]
        drawn = torch.cat([shard.terms[name].indices for _, shard in plan.shards()])
        assert torch.equal(distinct.magnitudes, spectrum.magnitudes)
        assert torch.equal(distinct.indices, drawn.unique())
        for terms in (distinct, *(shard.terms[name] for _, shard in plan.shards())):
            assert torch.equal(terms.u, spectrum.u[:, terms.indices])
            assert torch.equal(terms.v, spectrum.v[:, terms.indices])


def test_plan_lists_clients_and_nbytes_of_all_shards():
    plan = make_plan(make_net(), {"b": 0.5, "a": 0.25, "c": 0.5})
    assert (list(plan), len(plan), "a" in plan, "d" in plan) == (["b", "a", "c"], 3, True, False)
    assert plan.nbytes == sum(len(shard.to_bytes()) for _, shard in plan.shards())


def test_rescaled_terms_have_the_norm_of_the_weight():
    model = make_net()
    for _, shard in make_plan(model, {0: 0.25}, "prism_scaled").shards():
        for name, terms in shard.terms.items():
            composed = (terms.u * terms.multipliers) @ terms.v.mT
            assert composed.norm().item() == pytest.approx(model.get_submodule(name).weight.norm().item(), rel=1e-4)


@settings(max_examples=10)
@given(order=st.permutations(["a", "b", "c", 7]), round=st.integers(0, 1000))
def test_plan_with_clients_in_another_order_draws_the_same(order, round):
    budgets = {"a": 0.25, "b": 0.25, "c": 0.5, 7: 0.25}
    model = make_net()
    plan = make_plan(model, budgets, round=round)
    shuffled = make_plan(model, {client: budgets[client] for client in order}, round=round)
    assert list(shuffled) == order
    for client in budgets:
        assert plan.shard(client).to_bytes() == shuffled.shard(client).to_bytes()


def test_unbiased_plan_with_other_clients_draws_the_same():
    model = make_net()
    plan = make_plan(model, {"a": 0.25, "b": 0.25, "c": 0.5}, "unbiased")
    assert plan.shard("a").to_bytes() == make_plan(model, {"a": 0.25}, "unbiased").shard("a").to_bytes()


def test_plan_without_sharded_layers_warns():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="no layer of this Sequential is sharded"):
        shard = make_plan(model, {0: 0.1}).shard(0)
    assert (shard.keep_ratio, len(shard.whole)) == (1.0, 3)
    make_plan(model, {0: 0.1}, "dense")  # that is what was asked for: no warning


def test_plan_dense_entries_are_a_snapshot():
    model = make_net()
    plan = make_plan(model, {0: 0.5})
    before = plan.shard(0).to_bytes()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert plan.shard(0).to_bytes() == before


def test_plan_copies_what_is_sent_whole_once(monkeypatch):
    cloned, clone = [], torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **options: cloned.append(1) or clone(tensor, **options))
    plan = make_plan(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {0: 1.0}, "dense")
    assert len(cloned) == len(plan.whole) == 6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_of_a_zero_weight_warns_and_stays_trainable(strategy, caplog):
    model = make_net()
    torch.nn.init.zeros_(model[1].weight)
    shard = make_plan(model, {0: 0.25}, strategy).shard(0)
    if strategy != "dense":
        terms = shard.terms["1"]
        assert "layer 1 is all zero" in caplog.text
        assert (terms.u @ terms.v.mT).eq(0).all()
        assert terms.u.norm() + terms.v.norm() > 0


def test_plan_with_skip_and_also_shards_the_layers_of_factorize():
    torch.manual_seed(0)
    layers = [nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1, groups=8), nn.Linear(8, 8)]
    model = nn.Sequential(*layers)
    options = {"skip": "1", "also": nn.Embedding}
    plan = ShardPlanner("full", **options).plan(model, {0: 1.0})
    assert (
        plan.shard(0).terms.keys() == factorize(model, 1.0, **options).factorize_report.layers.keys() == {"0", "2", "4"}
    )
    assert set(ShardPlanner("full", skip="1").plan(model, {0: 1.0}).shard(0).terms) == {"2", "4"}
    with pytest.raises(UserError, match=r"also pattern 'token' matches no layer"):
        ShardPlanner("full", also="token").plan(model, {0: 1.0})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_plan_of_a_frozen_float8_layer_leaves_it_to_the_residual(dtype):
    model = make_net()
    model[6].weight = nn.Parameter(model[6].weight.detach().to(dtype), requires_grad=False)
    shard, residual = make_plan(model, {0: 0.5}).shard(0), ShardPlanner().frozen(model)
    assert (shard.terms.keys(), len(shard.to_bytes())) == ({"1", "4"}, shard.nbytes)
    assert (shard.whole.keys() & residual.parameters.keys(), len(residual.to_bytes())) == (set(), residual.nbytes)
    received = Frozen.from_bytes(residual.to_bytes())
    sent = client_model(model, Shard.from_bytes(shard.to_bytes()), frozen=received)[6].weight
    assert (sent.dtype, sent.requires_grad) == (dtype, False)
    assert torch.equal(sent.float(), model[6].weight.float())
    model[6].weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"6\.weight has NaN or Inf"):
        make_plan(model, {0: 0.5})


def test_dense_plans_of_two_models_have_different_ids():
    plans = [ShardPlanner("dense").plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {0: 1.0}) for _ in range(2)]
    assert plans[0].id != plans[1].id


def test_plan_of_a_model_on_meta_raises():
    with init_empty():
        skeleton = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(UserError, match=r"0\.weight is on the meta device"):
        ShardPlanner().plan(skeleton, {0: 0.5})


def test_plan_starts_threads_by_the_devices_of_its_layers(monkeypatch):
    seen = []
    threads = "sharding.matrices.spectrum.map_threads"
    monkeypatch.setattr(threads, lambda function, items, devices: seen.append(devices) or map(function, items))
    make_plan(make_net(), {0: 0.5})
    assert seen == [{torch.device("cpu")}]


def test_round_without_clients_changes_nothing():
    model = make_net()
    server = Server(model, ShardPlanner())
    assert server.step(server.average(server.plan({}, 0), {})).accepted == []
    torch.testing.assert_close(model.state_dict(), make_net().state_dict(), rtol=0, atol=0)
