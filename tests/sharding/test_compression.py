"""Compression: values are rounded once to the nearest of a grid, and never in the server's model."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sharding import COMPRESSIONS, Shard, ShardPlanner, Update, UserError, client_model, train_shard
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.norms import update_norm
from sharding.transport.compression import round_columns, round_outputs
from tests.sharding.models import aggregate, along, make_net, perturbed

ROUNDING = ("bfloat16", "int8")
BUDGETS = {"a": 0.4, "b": 0.4, "c": 0.7}


def plan_of(wire, strategy="collective"):
    return ShardPlanner(strategy, compression=wire).plan(make_net(), BUDGETS)


def updates_of(plan):
    """Updates by changes that are the same whatever the wire, before they are rounded."""
    return {c: along(shard, perturbed(shard, seed), 0.01) for seed, (c, shard) in enumerate(plan.shards())}


floats = st.floats(-(2.0**127), 2.0**127, width=32)  # the nearest to a number beyond may be infinite


@given(st.lists(floats, min_size=1, max_size=9))
def test_round_columns_in_int8_equals_exact_power_of_two_rounding(numbers):
    column = torch.tensor(numbers)[:, None]
    near = round_columns(column, "int8")[:, 0].tolist()
    largest = max(abs(Fraction(number)) for number in column[:, 0].tolist())
    exponent = -126
    while largest > 127 * Fraction(2) ** exponent:
        exponent += 1
    step = Fraction(2) ** exponent
    assert [Fraction(number) for number in near] == [round(Fraction(x) / step) * step for x in column[:, 0].tolist()]


@pytest.mark.parametrize("wire", ROUNDING)
@given(st.lists(floats, min_size=1, max_size=9))
def test_round_columns_of_rounded_values_is_idempotent(wire, numbers):
    once = round_columns(torch.tensor(numbers)[:, None], wire)
    assert torch.equal(round_columns(once, wire), once)


@pytest.mark.parametrize("wire", ROUNDING)
def test_round_outputs_equals_round_columns_of_the_transpose(wire):
    columns = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 20)
    rounded = round_columns(columns, wire).mT.reshape(20, 5, 10)
    assert torch.equal(round_outputs(columns.mT.reshape(20, 5, 10), wire), rounded)


@pytest.mark.parametrize("wire", COMPRESSIONS)
def test_serialization_of_shards_and_updates_is_lossless(wire):
    plan = plan_of(wire)
    for shard in (*dict(plan.shards()).values(), *updates_of(plan).values()):
        data = shard.to_bytes()
        assert len(data) == shard.nbytes
        again = type(shard).from_bytes(data)
        assert again.compression == wire
        assert again.to_bytes() == data
        torch.testing.assert_close(again.trained(), shard.trained(), rtol=0, atol=0)
        assert all(torch.equal(terms.indices, again.terms[name].indices) for name, terms in shard.terms.items())


def test_int8_shard_size_is_a_byte_per_value():
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30), nn.Linear(30, 20))
    shard = ShardPlanner("top_n", compression="int8").plan(model, {0: 0.5}).shard(0)
    n, data = 15, shard.to_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    terms = n * (40 + 30) + 2 * n + n * (4 + 4)  # u and v, their exponents, index and ω
    ends = 50 * 40 + 40 + 30 * 20 + 20  # the first and the last layer, an exponent an output
    assert len(data) - header == terms + ends + 4 * (40 + 30 + 20)
    assert json.loads(json.loads(data[8:header])["__metadata__"]["shard"])["wire"] == "int8"


@pytest.mark.parametrize("wire", ROUNDING)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_compressed_update_with_nan_or_inf_is_rejected(wire, bad):
    plan = plan_of(wire)
    updates = updates_of(plan)
    updates["b"].terms["1"].u[2, 1] = bad
    sent = {client: Update.from_bytes(update.to_bytes()) for client, update in updates.items()}
    assert not sent["b"].terms["1"].u[:, 1].isfinite().all()
    assert sent["b"].terms["1"].u[:, 0].isfinite().all()
    rejected = aggregate(make_net(), plan, sent, dict.fromkeys(plan, 1)).rejected
    assert rejected == {"b": Failure(Kind.NOT_FINITE, "NaN or Inf in 1.u")}


@pytest.mark.parametrize("wire", ROUNDING)
def test_average_of_compressed_changes_equals_the_average_of_values(wire):
    exact, rounded = plan_of("float32"), plan_of(wire)
    changes = updates_of(rounded)
    values = {
        client: shard.returned({name: part + changes[client].trained()[name] for name, part in shard.trained().items()})
        for client, shard in exact.shards()
    }
    ours, theirs = make_net(), make_net()
    weights = {"a": 1, "b": 2, "c": 5}
    assert aggregate(ours, rounded, changes, weights).accepted == list(BUDGETS)
    aggregate(theirs, exact, values, weights)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert not any(torch.equal(make_net().state_dict()[name], part) for name, part in theirs.state_dict().items())


@pytest.mark.parametrize("wire", ROUNDING)
@pytest.mark.parametrize("lr", [1e-1, 1e-6])
def test_compressed_change_is_accurate_at_any_size(wire, lr):
    shard = plan_of(wire).shard("a")
    batches = [(torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3)]
    changes = train_shard(make_net(), shard, batches, lr).trained()
    exact = train_shard(make_net(), replace(shard, compression="float32"), batches, lr)
    for name, before in shard.trained().items():
        change = exact.trained()[name] - before
        if float(change.norm()) > 1e-4 * float(before.norm()):  # else float32 itself tells less of it
            assert float((changes[name] - change).norm()) < 0.02 * float(change.norm())
    one, other = update_norm(shard, exact), update_norm(shard, shard.returned(exact.trained()))
    torch.testing.assert_close(other, one, rtol=0.01, atol=0)


@pytest.mark.parametrize("wire", COMPRESSIONS)
def test_update_of_a_client_model_without_copy_is_equal(wire):
    updates = []
    for copy in (True, False):
        shard = plan_of(wire).shard("a")
        model = client_model(make_net(), shard, copy=copy)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.25
        updates.append(shard.read_from(model).trained())
    assert all(torch.equal(part, updates[1][name]) and bool(part.any()) for name, part in updates[0].items())


def test_compression_of_float64_values_is_lossless():
    model = make_net()
    model[4].double()
    plans = [ShardPlanner("top_n", compression=wire).plan(model, {0: 0.4}) for wire in ("float32", "int8")]
    sent = plans[1].shard(0)
    for terms in (sent.terms["4"], Shard.from_bytes(sent.to_bytes()).terms["4"]):
        torch.testing.assert_close(vars(terms), vars(plans[0].shard(0).terms["4"]), rtol=0, atol=0)


def test_bfloat16_compression_of_a_bfloat16_model_raises():
    with pytest.raises(UserError, match="this model has some in bfloat16: leave it out"):
        ShardPlanner(compression="bfloat16").plan(make_net().bfloat16(), {0: 0.4})


@pytest.mark.parametrize("wire", ROUNDING)
def test_compression_where_no_matrix_is_sent_in_float32_raises(wire):
    model = make_net().double()
    model[0].bias = nn.Parameter(model[0].bias.float())  # vectors are not rounded
    planner = ShardPlanner(compression=wire)
    message = f"compression='{wire}' is for weights in float32; this model sends none in float32: leave it out"
    for use in (planner.nbytes, lambda model, ratio: planner.plan(model, {0: ratio})):
        with pytest.raises(UserError, match=message):
            use(model, 0.4)


def test_frozen_weights_in_bfloat16_which_are_not_sent_do_not_forbid_compression():
    model = make_net()
    model[0].bfloat16().requires_grad_(False)
    shard = ShardPlanner(compression="bfloat16").plan(model, {0: 0.4}).shard(0)
    assert torch.bfloat16 not in {part.dtype for part in shard.state().values()}


def test_a_tail_keeps_its_type_whatever_the_compression():
    shard = (
        ShardPlanner("top_n", compression="bfloat16", tail_format="bfloat16")
        .plan(make_net(), {0: 0.4, 1: 1.0})
        .shard(0)
    )
    read = Shard.from_bytes(shard.to_bytes())
    assert {part.dtype for part in read.tail.values()} == {torch.bfloat16}
    torch.testing.assert_close(read.tail, shard.tail, rtol=0, atol=0)
    assert read.terms["4"].u.dtype == torch.float32
