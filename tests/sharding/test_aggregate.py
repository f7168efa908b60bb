"""Per-vector averaging against the definition written as loops, and invalid updates."""

import re
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from itertools import product
from math import nan, prod
from threading import Lock
from time import sleep

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sharding import Server, ShardPlanner, Update, UserError, train_shard
from sharding.layers import as_blocks, num_blocks
from sharding.matrices.spectrum import compose, decompose_batch
from sharding.rounds.aggregation.aggregate import Average
from sharding.rounds.aggregation.faults import NOTHING
from sharding.rounds.aggregation.max_share import cap_weights
from sharding.rounds.failures import Failure, Kind
from tests.sharding.models import aggregate, make_net, make_plan, perturbed, spectra_of, unchanged

BUDGETS = {"a": 0.25, "b": 0.25, "c": 0.5, "d": 0.5}
NUM_SAMPLES = {"a": 10, "b": 30, "c": 5, "d": 1}


@pytest.fixture
def round_one():
    """(server model, plan, updates) of one round with two keep ratios."""
    model = make_net().double()
    plan = make_plan(model, BUDGETS, "unbiased")
    return model, plan, {client: perturbed(shard, i) for i, (client, shard) in enumerate(plan.shards())}


def assert_equal(model, state):
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def by_the_definition(spectra, updates):
    """u'ᵢ ← Σ D_c u'ᵢ⁽ᶜ⁾ / Σ D_c over those who drew i, term by term; then W = Σ u'ᵢ v'ᵢᵀ."""
    weights = {}
    for name, spectrum in spectra.items():
        weight = torch.zeros(len(spectrum.u), len(spectrum.v), dtype=torch.float64)
        for i in range(len(spectrum.magnitudes)):
            holders = [
                (client, shard.terms[name].indices.tolist().index(i))
                for client, shard in updates.items()
                if i in shard.terms[name].indices.tolist()
            ]
            u, v = spectrum.u[:, i], spectrum.v[:, i]
            if holders:
                total = sum(NUM_SAMPLES[c] for c, _ in holders)
                u = sum(NUM_SAMPLES[c] * updates[c].terms[name].u[:, k] for c, k in holders) / total
                v = sum(NUM_SAMPLES[c] * updates[c].terms[name].v[:, k] for c, k in holders) / total
            weight += torch.outer(u, v)
        weights[name] = weight
    return weights


def test_average_into_a_model_of_another_plan_raises_and_changes_nothing(round_one):
    model, plan, updates = round_one
    other = nn.Sequential(*list(model)[:-1])
    before = deepcopy(other.state_dict())
    with pytest.raises(UserError, match=r"the model has no 7\.bias, 7\.weight;"):
        aggregate(other, plan, updates, NUM_SAMPLES)
    assert_equal(other, before)


def test_average_of_terms_is_over_the_clients_that_drew_them(round_one):
    model, plan, updates = round_one
    spectra = spectra_of(model, plan)
    expected = by_the_definition(spectra, updates)
    drawn = {name: torch.cat([shard.terms[name].indices for _, shard in plan.shards()]).unique() for name in expected}
    assert any(len(drawn[name]) < len(spectra[name].magnitudes) for name in drawn), "some stay as they were"
    outcome = aggregate(model, plan, updates, NUM_SAMPLES)
    assert outcome.accepted == list(BUDGETS)
    assert outcome.rejected == {}
    for name, weight in expected.items():
        torch.testing.assert_close(model.get_submodule(name).weight.flatten(1), weight, rtol=0, atol=1e-12)
    total = sum(NUM_SAMPLES.values())
    for name in plan.shard("a").whole:
        mean = sum(NUM_SAMPLES[c] * updates[c].whole[name] for c in updates) / total
        torch.testing.assert_close(model.state_dict()[name], mean, rtol=0, atol=1e-12)


def doubled(update: Update) -> Update:
    terms = {name: replace(terms, multipliers=2 * terms.multipliers) for name, terms in update.terms.items()}
    return replace(update, terms=terms)


ALIKE = {
    "multipliers": lambda updates: {client: doubled(shard) for client, shard in updates.items()},
    "travel": lambda updates: {client: Update.from_bytes(update.to_bytes()) for client, update in updates.items()},
}


@pytest.mark.parametrize("alike", ALIKE.values(), ids=ALIKE)
def test_average_is_invariant_to_multipliers_and_serialization(round_one, alike):
    model, plan, updates = round_one
    other = deepcopy(model)
    aggregate(model, plan, updates, NUM_SAMPLES)
    assert aggregate(other, plan, alike(updates), NUM_SAMPLES).accepted == list(BUDGETS)
    assert_equal(model, other.state_dict())


def corrupted(shard: Update, part: str, change) -> Update:
    """The same update with one tensor replaced."""
    name, terms = next(iter(shard.terms.items()))
    return replace(shard, terms={**shard.terms, name: replace(terms, **{part: change(getattr(terms, part))})})


def with_dense(shard: Update, change) -> Update:
    """The same update with all dense tensors replaced."""
    return replace(shard, whole={name: change(tensor) for name, tensor in shard.whole.items()})


NAN, INF = float("nan"), float("inf")
FAULTS = {
    "nothing": (lambda shard: None, "nothing returned"),
    "NaN": (lambda shard: corrupted(shard, "u", lambda u: u * NAN), "NaN or Inf in 1.u"),
    "Inf": (lambda shard: corrupted(shard, "v", lambda v: v / 0.0), "NaN or Inf in 1.v"),
    "Inf and -Inf": (lambda shard: corrupted(shard, "u", lambda u: u.sign() * INF), "NaN or Inf in 1.u"),
    "dense NaN": (lambda shard: with_dense(shard, lambda tensor: tensor * NAN), "NaN or Inf in 0"),
    "shape": (lambda shard: corrupted(shard, "u", lambda u: u[:, :-1]), r"1.u has shape \(8, 1\), not \(8, 2\)"),
    "dense shape": (lambda shard: with_dense(shard, lambda tensor: tensor[None]), r"0.weight has shape \(1, "),
    "half": (lambda shard: corrupted(shard, "u", lambda u: u.half()), "1.u is torch.float16, not torch.float64"),
    "sparse": (lambda shard: corrupted(shard, "u", lambda u: u.to_sparse()), "1.u is a Tensor, not a dense tensor"),
    "meta": (lambda shard: corrupted(shard, "u", lambda u: u.to("meta")), "1.u is a Tensor, not a dense tensor"),
    "numpy": (lambda shard: corrupted(shard, "u", lambda u: u.numpy()), "1.u is a ndarray, not a dense tensor"),
    "indices above": (lambda shard: corrupted(shard, "indices", lambda i: i + 1000), "1.indices are not those of the"),
    "indices twice": (lambda shard: corrupted(shard, "indices", lambda i: i[:1].repeat(2)), "1.indices are not those"),
    "indices broken": (lambda shard: corrupted(shard, "indices", lambda i: i.double()), "1.indices is torch.float64"),
    "too few indices": (lambda shard: corrupted(shard, "indices", lambda i: i[:1]), r"1.indices has shape \(1,\)"),
    "no multipliers": (lambda shard: corrupted(shard, "multipliers", lambda m: None), "1.multipliers is a NoneType"),
    "layers": (lambda shard: replace(shard, terms={}), "other layers: 1.u, 1.v, 4.u"),
    "another layer": (
        lambda shard: replace(shard, terms={**shard.terms, "x": shard.terms["1"]}),
        "other layers: x.u, x.v",
    ),
    "no dense": (lambda shard: replace(shard, whole={}), "other layers: 0.bias, 0.weight"),
    "terms passed off as dense": (
        lambda shard: replace(
            shard,
            terms={name: terms for name, terms in shard.terms.items() if name != "1"},
            whole={**shard.whole, **{f"1.{part}": getattr(shard.terms["1"], part) for part in "uv"}},
        ),
        "other layers",
    ),
    "another compression": (lambda shard: replace(shard, compression="int8"), "an update in int8, not in float32"),
    "not a shard": (lambda shard: {"u": 1}, "a dict, not an update"),
    "another plan": (
        lambda shard: replace(shard, plan_id="0-0"),
        r"an update of the plan '0-0', not of '0-[0-9a-f]{16}'",
    ),
    "no terms": (lambda shard: replace(shard, terms=None), "not a readable update: AttributeError"),
    "terms of nothing": (lambda shard: replace(shard, terms=dict.fromkeys(shard.terms)), "not a readable update"),
}


@pytest.mark.parametrize(("corrupt", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_average_with_an_invalid_update_rejects_it_alone(round_one, corrupt, reason):
    model, plan, updates = round_one
    without = deepcopy(model)
    aggregate(without, plan, {c: s for c, s in updates.items() if c != "b"}, NUM_SAMPLES)
    outcome = aggregate(model, plan, updates | {"b": corrupt(updates["b"])}, NUM_SAMPLES)
    assert outcome.accepted == ["a", "c", "d"]
    assert list(outcome.rejected) == ["b"]
    assert re.search(reason, outcome.rejected["b"].message)
    assert_equal(model, without.state_dict())


def test_update_of_another_plan_with_equal_shapes_is_rejected():
    """All terms for everybody: indices tell nothing."""
    model = make_net()
    plans = [make_plan(model, BUDGETS, "full", round) for round in (0, 1)] + [make_plan(model, BUDGETS, "full", seed=1)]
    with torch.no_grad():
        model[1].weight.mul_(1.001)
    plans += [make_plan(model, BUDGETS, "full")]
    for i, plan in enumerate(plans):
        outcomes = [aggregate(deepcopy(model), plan, {"a": unchanged(other.shard("a"))}, {"a": 1}) for other in plans]
        assert [bool(outcome.accepted) for outcome in outcomes] == [j == i for j in range(len(plans))]
    assert "an update of the plan '0-" in outcomes[0].rejected["a"].message


def test_second_update_of_a_client_is_ignored_with_a_warning(round_one, caplog):
    model, plan, updates = round_one
    other = deepcopy(model)
    aggregate(other, plan, updates | {"b": None}, NUM_SAMPLES)
    stream = [("a", updates["a"]), ("b", None), ("a", updates["b"]), ("b", updates["b"])]
    outcome = aggregate(model, plan, iter([*stream, ("c", updates["c"]), ("d", updates["d"])]), NUM_SAMPLES)
    assert (outcome.accepted, outcome.rejected) == (["a", "c", "d"], {"b": NOTHING})
    assert_equal(model, other.state_dict())
    assert caplog.text.count("sent another update in the same round") == 2


def test_update_of_a_client_outside_the_plan_is_rejected(round_one):
    model, plan, updates = round_one
    other = deepcopy(model)
    aggregate(other, plan, updates, NUM_SAMPLES)
    outcome = aggregate(model, plan, [("x", updates["a"]), *updates.items()], NUM_SAMPLES | {"x": 7})
    unknown = Failure(Kind.OTHER_PLAN, "is not in this round's plan")
    assert (outcome.accepted, outcome.rejected) == (list(BUDGETS), {"x": unknown})
    assert_equal(model, other.state_dict())


@pytest.mark.parametrize("weight", [0, -1, NAN, INF, "10", None, True, 10**400, torch.ones(1)], ids=str)
def test_update_with_an_invalid_weight_is_rejected(round_one, weight):
    model, plan, updates = round_one
    without = deepcopy(model)
    aggregate(without, plan, updates, {c: w for c, w in NUM_SAMPLES.items() if c != "b"})
    late = Server(deepcopy(model), ShardPlanner()).average_as_reported(plan)
    late.add("b", updates["b"], weight)
    for outcome in (aggregate(model, plan, updates, NUM_SAMPLES | {"b": weight}), late.finish()[1]):
        assert "not a finite number above 0" in outcome.rejected["b"].message
        assert ("pass its .item()" in outcome.rejected["b"].message) == isinstance(weight, torch.Tensor)
        assert "b" not in outcome.accepted
    assert_equal(model, without.state_dict())


def test_average_with_denormal_weights_equals_the_average_with_ones(round_one):
    model, plan, updates = round_one
    plain, tiny = deepcopy(model), dict.fromkeys(BUDGETS, 1e-310)
    aggregate(plain, plan, updates, dict.fromkeys(BUDGETS, 1.0))
    assert aggregate(model, plan, updates, tiny).accepted == list(BUDGETS)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("total", [0, -1, NAN, INF, "4", True])
def test_average_with_an_invalid_total_raises_and_changes_nothing(round_one, total):
    model, plan, updates = round_one
    before = deepcopy(model.state_dict())
    with pytest.raises(UserError, match=r"total is .*; pass a"):
        aggregate(model, plan, updates, NUM_SAMPLES, total)
    assert_equal(model, before)


def test_average_with_an_overflow_is_rejected_and_changes_nothing(round_one):
    model = round_one[0].float()
    plan = make_plan(model, BUDGETS, "full")
    before = deepcopy(model.state_dict())
    huge = {
        c: corrupted(corrupted(unchanged(shard), "u", lambda u: u * 0 + 1e38), "v", lambda v: v * 0 + 1e38)
        for c, shard in plan.shards()
    }
    outcome = aggregate(model, plan, huge, NUM_SAMPLES)
    assert outcome.accepted == []
    assert set(outcome.rejected) == set(BUDGETS)
    assert "1.weight would have NaN or Inf; the model stays as it was" in outcome.rejected["a"].message
    assert_equal(model, before)


def test_average_without_updates_changes_nothing(round_one):
    model, plan, _ = round_one
    before = deepcopy(model.state_dict())
    outcome = aggregate(model, plan, {}, NUM_SAMPLES)
    assert outcome.rejected == dict.fromkeys(BUDGETS, NOTHING)
    assert_equal(model, before)


def test_average_with_num_samples_of_unknown_clients_warns(round_one):
    model, plan, _ = round_one
    with pytest.warns(UserWarning, match="num_samples has no client of the plan") as caught:
        Server(model, ShardPlanner()).average(plan, {"A": 1})
    assert caught[0].filename == __file__


PROBABILITIES = {"a": 0.3, "b": 1.0, "c": 0.5, "d": 0.7}


def subsets(probabilities):
    """Every set of independently drawn clients, with its chance."""
    for draw in product([False, True], repeat=len(probabilities)):
        drawn = [client for client, chosen in zip(probabilities, draw, strict=True) if chosen]
        yield drawn, prod(p if chosen else 1 - p for p, chosen in zip(probabilities.values(), draw, strict=True))


@pytest.mark.parametrize("server_lr", [1.0, 0.4])
def test_sampled_uploads_of_dense_parameters_are_unbiased(round_one, server_lr):
    model, plan, updates = round_one
    total = sum(NUM_SAMPLES.values())
    expected = {name: torch.zeros_like(tensor) for name, tensor in plan.shard("a").whole.items()}
    for drawn, chance in subsets(PROBABILITIES):
        copy = deepcopy(model)
        weights = {c: NUM_SAMPLES[c] / PROBABILITIES[c] for c in drawn}
        outcome = aggregate(copy, plan, updates, weights, total, server_lr)
        assert (outcome.accepted, outcome.rejected) == (drawn, {})
        for name, mean in expected.items():
            mean += chance * copy.state_dict()[name]
    for name, mean in expected.items():
        old = plan.shard("a").whole[name]
        step = sum(NUM_SAMPLES[c] * (updates[c].whole[name] - old) for c in updates) / total
        torch.testing.assert_close(mean, old + server_lr * step, rtol=0, atol=1e-12)


def test_sampled_uploads_of_terms_are_weighted_by_size_over_probability(round_one):
    model, plan, updates = round_one
    weights = {c: NUM_SAMPLES[c] / PROBABILITIES[c] for c in "acd"}
    reweighted = deepcopy(model)
    aggregate(model, plan, updates, weights, sum(NUM_SAMPLES.values()))
    aggregate(reweighted, plan, {c: updates[c] for c in "acd"}, weights)  # vectors: the plain rule with these weights
    for name in plan.spectra:
        assert torch.equal(model.get_submodule(name).weight, reweighted.get_submodule(name).weight)


def test_sampled_upload_that_fails_scales_the_others_up(round_one):
    model, plan, updates = round_one
    weights = {c: NUM_SAMPLES[c] / PROBABILITIES[c] for c in "abd"}
    total = float(sum(NUM_SAMPLES.values()))
    other = deepcopy(model)
    outcome = aggregate(model, plan, updates | {"b": None}, weights, total)
    assert outcome.rejected == {"b": NOTHING}
    left = weights["a"] + weights["d"]
    aggregate(other, plan, updates, {c: weights[c] for c in "ad"}, total * left / (left + weights["b"]))
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=1e-13)


def test_update_of_frozen_parameters_is_rejected_and_changes_nothing():
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    net.register_buffer("table", torch.arange(5) * 10)
    before = deepcopy(net.state_dict())
    planner = ShardPlanner()
    plan, residual = planner.plan(net, {"a": 0.5, "b": 0.5}), planner.frozen(net)
    batches = [(torch.randn(4, 8), torch.randint(8, (4,)))]
    everything = replace(unchanged(plan.shard("b")), whole=plan.shard("b").whole)
    updates = {"a": train_shard(net, plan.shard("a"), batches, 0.1, frozen=residual), "b": everything}
    outcome = aggregate(net, plan, updates, {"a": 100, "b": 50})
    assert (outcome.accepted, list(outcome.rejected)) == (["a"], ["b"])
    assert "other layers: table" in outcome.rejected["b"].message
    for name in ("0.weight", "0.bias", "2.bias", "table"):
        torch.testing.assert_close(net.state_dict()[name], before[name], rtol=0, atol=0)
    assert not torch.equal(net.state_dict()["1.bias"], before["1.bias"])


@pytest.mark.parametrize("wire", ["int8", "bfloat16"])
def test_sent_shard_returned_under_compression_is_rejected(wire):
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    before = deepcopy(net.state_dict())
    plan = ShardPlanner("full", compression=wire).plan(net, {"a": 1.0, "b": 1.0})
    received = Update.from_bytes(plan.shard("a").to_bytes())
    outcome = aggregate(net, plan, {"a": received, "b": plan.shard("b")}, {"a": 1, "b": 1})
    assert not outcome.accepted
    assert wire in outcome.rejected["a"].message
    assert outcome.rejected["b"].message == "a Shard, not an update"
    assert_equal(net, before)
    update = train_shard(net, plan.shard("a"), [(torch.randn(4, 8), torch.randint(8, (4,)))], 0.1)
    again = Update.from_bytes(update.to_bytes())
    assert (again.changes, again.compression) == (True, wire)
    assert len(update.to_bytes()) == update.nbytes
    assert aggregate(net, plan, {"a": again}, {"a": 1}).accepted == ["a"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_update_computed_in_another_dtype_is_accepted(dtype, wire):
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    plan = ShardPlanner(compression=wire).plan(net, {"a": 0.5})
    batches = [(torch.randn(4, 8, dtype=dtype), torch.randint(8, (4,)))]
    update = train_shard(deepcopy(net).to(dtype), plan.shard("a"), batches, 0.1)
    assert aggregate(net, plan, {"a": update}, {"a": 1}).accepted == ["a"]


@pytest.mark.parametrize(
    ("weights", "most", "expected"),
    [
        ([1.0, 2.0, 3.0], 0.5, [1.0, 2.0, 3.0]),  # 3 of 6 is a half
        ([1.0, 2.0, 9.0], 0.5, [1.0, 2.0, 3.0]),
        ([1.0, 9.0, 8.0], 0.4, [1.0, 2.0, 2.0]),
        ([700.0, 200_000.0], 0.5, [700.0, 700.0]),
        ([5.0, 1.0, 2.0], 0.2, [1.0, 1.0, 1.0]),  # too few for that
        ([5.0], 0.5, [5.0]),
        ([], 0.5, []),
    ],
)
def test_max_share_of_any_weights_limits_them_to_the_share(weights, most, expected):
    capped = cap_weights(dict(enumerate(weights)), most)
    assert list(capped.values()) == pytest.approx(expected)
    assert list(capped) == [*range(len(weights))]


@pytest.mark.parametrize("of_all", [False, True])
def test_max_share_limits_a_client_with_a_huge_weight(round_one, of_all):
    model, plan, updates = round_one
    num_samples, other = {**NUM_SAMPLES, "d": 2.0**62}, deepcopy(model)
    aggregate(model, plan, updates, num_samples, sum(num_samples.values()) if of_all else None, max_share=0.5)
    aggregate(other, plan, updates, {**NUM_SAMPLES, "d": 45})
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)


def shares_of(weights, max_share, failed=()):
    """Return each client's share of the average of a parameter; those that failed send NaN."""
    plan = make_plan(nn.Linear(1, len(weights), bias=False).double(), dict.fromkeys(weights, 1.0), "dense")
    shares = []
    server = Server(nn.Linear(1, 1), ShardPlanner("dense"), max_share=max_share)
    for average in (server.average(plan, weights), server.average_as_reported(plan)):
        for row, client in enumerate(weights):
            change = torch.zeros(len(weights), 1).double()
            change[row] = nan if client in failed else 1
            shard = plan.shard(client)
            values = {name: value + change for name, value in shard.trained().items()}
            average.add(client, shard.returned(values), weights[client])
        (delta,) = average.finish()[0].values()
        shares.append(dict(zip(weights, delta.flatten().tolist(), strict=True)))
    assert shares[0] == pytest.approx(shares[1])
    return shares[0]


@pytest.mark.parametrize(
    ("weights", "failed"),
    [
        ({"a": 1e9, "b": 1e9, "c": 100, "d": 100}, ["b"]),
        ({"c": 100, "d": 100, "a": 1e9, "b": 1e9}, ["b"]),
        ({"a": 1e308, "b": 1e308, "c": 100, "d": 100}, ["b"]),
    ],
    ids=["heavy ones first", "heavy ones last", "infinite sum"],
)
def test_max_share_is_that_of_the_updates_that_count(weights, failed):
    shares = shares_of(weights, 0.5, failed)
    light = [client for client in weights if client not in ("a", *failed)]
    assert shares["a"] == pytest.approx(0.5)
    assert [shares[client] for client in light] == pytest.approx([0.5 / len(light)] * len(light))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.sampled_from([0.15, 0.3, 0.5, 0.7]))
def test_max_share_of_any_weights_is_that_of_capped_ones(weights, most):
    clients = {f"c{number}": float(weight) for number, weight in enumerate(weights)}
    capped = cap_weights(clients, most)
    expected = {client: weight / sum(capped.values()) for client, weight in capped.items()}
    assert shares_of(clients, most) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "kept"),
    [({f"c{number}": float(number) for number in range(1, 9)}, ["c7", "c8"]), (dict.fromkeys("cabd", 1.0), ["b", "d"])],
    ids=["the heaviest", "the last of equal ones"],
)
def test_max_share_keeps_few_updates(weights, kept):
    plan = make_plan(nn.Linear(2, 2).double(), dict.fromkeys(weights, 1.0), "dense")
    average = Server(nn.Linear(2, 2), ShardPlanner("dense"), max_share=0.5).average(plan, weights)
    for client, shard in plan.shards():
        average.add(client, unchanged(shard))
        assert len(average._kept) <= 2
    assert [*average._kept] == kept


def test_updates_from_threads_are_averaged_as_from_one(monkeypatch):
    """Each sum is slow here, so that without a lock all of them would run at once."""
    add, busy = Average._count, Lock()

    def slow(self, *args):
        assert busy.acquire(blocking=False), "two updates were summed at once"
        sleep(0.005)
        add(self, *args)
        busy.release()

    clients = dict.fromkeys(range(12), 0.5)
    plan = make_plan(make_net().double(), clients)
    updates = {client: perturbed(shard, client) for client, shard in plan.shards()}
    monkeypatch.setattr(Average, "_count", slow)

    def step(threads):
        model = make_net().double()
        server = Server(model, ShardPlanner("collective"))
        average = server.average(plan, dict.fromkeys(clients, 1))
        with ThreadPoolExecutor(threads) as pool:
            assert [*pool.map(average.add, updates, updates.values())] == [None] * 12
        assert [*server.step(average).accepted] == [*clients]
        return model.state_dict()

    torch.testing.assert_close(step(8), step(1), rtol=0, atol=1e-13)


def test_shards_of_a_plan_in_threads_have_the_same_bytes():
    clients = {number: 0.2 + 0.05 * (number % 4) for number in range(12)}
    one, other = make_plan(make_net(), clients), make_plan(make_net(), clients)
    with ThreadPoolExecutor(8) as threads:
        shards = list(threads.map(one.shard, clients))
    assert [shard.to_bytes() for shard in shards] == [other.shard(client).to_bytes() for client in clients]


@pytest.mark.parametrize("kind", [nn.Linear(9, 7), nn.Conv2d(6, 14, 2, groups=2)], ids=["linear", "grouped"])
def test_weight_change_in_strips_equals_the_difference_of_products(kind, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn_like(kind.weight, dtype=torch.float64)
    (spectrum,) = decompose_batch([as_blocks(weight, num_blocks(kind))], [lambda magnitudes: torch.tensor([0, 2, 3])])
    u, v = torch.randn_like(spectrum.u), torch.randn_like(spectrum.v)
    monkeypatch.setattr("sharding.matrices.spectrum.MOVED_STRIP", 3)  # of 7 rows
    expected = compose(u, v, spectrum.blocks) - compose(spectrum.u, spectrum.v, spectrum.blocks)
    torch.testing.assert_close(spectrum.changes(u, v)["weight"], expected, rtol=0, atol=1e-12)
    assert not spectrum.changes(spectrum.u, spectrum.v)["weight"].any()
