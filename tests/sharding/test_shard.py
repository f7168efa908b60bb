"""Serialization of shards, and loading into and reading from a client's model."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from sharding import COMPRESSIONS, Shard, ShardPlanner, Update, UserError, client_model, factorize
from sharding.factorization import CoverageWarning
from sharding.modules.state import whole_state
from sharding.rounds.codec import Terms
from sharding.rounds.norms import update_norm
from tests.sharding.models import aggregate, make_net, make_plan, perturbed


def assert_same(one: Shard | Update, other: Shard | Update) -> None:
    assert one.terms.keys() == other.terms.keys()
    assert one.whole.keys() == other.whole.keys()
    for name, terms in one.terms.items():
        for part in ("indices", "u", "v", "multipliers"):
            assert torch.equal(getattr(terms, part), getattr(other.terms[name], part))
    for name, tensor in one.whole.items():
        assert torch.equal(tensor, other.whole[name])
    assert (one.keep_ratio, one.compression) == (other.keep_ratio, other.compression)
    if isinstance(one, Shard) and isinstance(other, Shard):
        assert one.fixed == other.fixed


INTEGERS = {
    f"table.{dtype}": torch.ones(3, dtype=dtype)
    for bits in (8, 16, 32, 64)
    for dtype in (torch.bool, getattr(torch, f"int{bits}"), getattr(torch, f"uint{bits}"))
}


@given(
    layers=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1), st.integers(1, 40), max_size=4
    ),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    whole=st.integers(0, 12),
    keep_ratio=st.floats(0, 1, exclude_min=True),
    fixed=st.integers(0, 3),
    compression=st.sampled_from(list(COMPRESSIONS)),
)
def test_nbytes_of_any_shard_equals_its_serialized_size(layers, dtype, whole, keep_ratio, fixed, compression):
    assume(compression != "bfloat16" or dtype != torch.bfloat16)
    terms = {
        name: Terms(torch.arange(n), torch.ones(3, n, dtype=dtype), torch.ones(5, n, dtype=dtype), torch.ones(n))
        for name, n in layers.items()
    }
    rest = {f"layer{i}.bias": torch.ones(10**i % 1001, dtype=torch.float32) for i in range(whole)}
    rest |= {f"layer{i}.weight": torch.ones(2, 10**i % 1001, 2, dtype=torch.float32) for i in range(whole)}
    names = frozenset([*list(rest)[:fixed], *list(terms)[:fixed], *INTEGERS])
    shard = Shard(terms, rest | INTEGERS, keep_ratio, names, compression=compression)
    data = shard.to_bytes()
    assert len(data) == shard.nbytes
    assert_same(Shard.from_bytes(data), shard)


@pytest.mark.parametrize("keep_ratio", [0.3, 1.0])
def test_load_into_then_read_from_returns_an_equal_copy(keep_ratio):
    shard = make_plan(make_net(), {0: keep_ratio}, "unbiased").shard(0)
    client = factorize(make_net(), keep_ratio)
    for parameter in client.parameters():
        parameter.data.fill_(7.0)
    shard.load_into(client)
    returned = shard.read_from(client)
    for name, terms in shard.terms.items():
        assert torch.equal(client.get_submodule(name).multipliers, terms.multipliers)
    other = perturbed(shard, 1)
    replace(shard, terms=other.terms, whole=other.whole).load_into(client)
    assert_same(returned, shard)


def test_clip_takes_bytes_only_where_it_is_unusual():
    usual, clipped, none = (
        ShardPlanner("unbiased", clip=clip).plan(make_net(), {0: 0.3}).shard(0) for clip in (10.0, 2.0, None)
    )
    assert usual.nbytes == replace(clipped, clip=10.0).nbytes < min(clipped.nbytes, none.nbytes)
    for shard in (usual, clipped, none):
        assert Shard.from_bytes(shard.to_bytes()).clip == shard.clip
        assert len(shard.to_bytes()) == shard.nbytes
        assert len(shard.returned(shard.trained()).to_bytes()) == usual.returned(usual.trained()).nbytes


def file_of(tensors, **words):
    """A file with these tensors, and with this metadata of a shard."""
    return safetensors.torch.save(tensors, {"shard": json.dumps({"keep_ratio": 1, "plan": ""} | words)})


@pytest.mark.parametrize("clip", [0.5, "ten", True, float("nan")])
def test_from_bytes_of_an_invalid_clip_raises(clip):
    tensors = {"dense/bias": torch.ones(3)}
    assert Shard.from_bytes(file_of(tensors)).keep_ratio == 1.0
    with pytest.raises(UserError, match="its metadata has"):
        Shard.from_bytes(file_of(tensors, clip=clip))


def test_update_norm_equals_the_norm_of_all_changes():
    model = make_net().double()
    sent = make_plan(model, {"a": 0.5}).shard("a")
    returned = perturbed(sent, 3)
    squares = sum(((returned.whole[n] - t) ** 2).sum() for n, t in sent.whole.items())
    for name, terms in sent.terms.items():
        after = returned.terms[name]
        squares += ((after.u - terms.u) ** 2).sum() + ((after.v - terms.v) ** 2).sum()
    torch.testing.assert_close(update_norm(sent, returned), squares.sqrt(), rtol=1e-12, atol=0)
    assert update_norm(sent, sent.returned(sent.trained())) == 0


def test_update_norm_is_invariant_to_order_and_serialization():
    sent = make_plan(make_net(), {0: 0.5}).shard(0)
    for seed in range(20):
        returned = perturbed(sent, seed)
        turned = Update(dict(reversed(returned.terms.items())), dict(reversed(returned.whole.items())))
        norm = update_norm(sent, returned)
        assert torch.equal(update_norm(sent, turned), norm)
        assert torch.equal(update_norm(sent, Update.from_bytes(returned.to_bytes())), norm)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def round_of(model: nn.Module, **options) -> tuple[Shard, nn.Module]:
    """Send a model's shard to a client that trains it a step, and aggregate. Returns the shard and the client."""
    plan = ShardPlanner("top_n", **options).plan(model, {0: 1.0})
    residual = ShardPlanner("top_n", **options).frozen(model)
    client = client_model(deepcopy(model).to("meta"), plan.shard(0), frozen=residual)
    with torch.no_grad():
        for parameter in client.parameters():
            parameter.add_(parameter.requires_grad * 0.5)
    outcome = aggregate(model, plan, {0: Update.from_bytes(plan.shard(0).read_from(client).to_bytes())}, {0: 1})
    assert outcome.accepted == [0]
    return plan.shard(0), client


def test_load_into_a_model_without_the_tied_weights_raises():
    with pytest.warns(CoverageWarning):
        client = factorize(Tied(), 0.5)
    client.head.weight = nn.Parameter(client.head.weight.detach().clone())
    with pytest.raises(UserError, match=r"head.weight is not in the shard"):
        make_plan(Tied(), {0: 0.5}).shard(0).load_into(client)


def test_round_with_a_module_registered_twice_shards_it_once():
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), shared, shared, nn.Linear(8, 8))
    shard, client = round_of(model)
    assert set(shard.terms) == {"1"}
    assert set(shard.whole) == {"0.weight", "0.bias", "1.bias", "3.weight", "3.bias"}
    assert model[1] is model[2]
    assert client[1] is client[2]
    x = torch.randn(2, 8)
    torch.testing.assert_close(model(x), client(x), rtol=1e-4, atol=1e-4)


def test_round_with_a_single_layer_model_works():
    model, x = nn.Linear(8, 6), torch.randn(2, 8)
    shard, client = round_of(model, skip=())
    assert set(shard.whole) == {"bias"}
    torch.testing.assert_close(model(x), client(x), rtol=1e-4, atol=1e-4)


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def test_frozen_terms_are_sent_but_not_returned_and_frozen_parameters_not_sent():
    names = ("0.weight", "2.bias", "4.weight")
    model, free = freeze(make_net(), *names), make_plan(make_net(), {0: 1.0}, "top_n").shard(0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    shard, client = round_of(model)
    assert shard.fixed == {"4"}
    once = {"0.weight", "2.bias"}
    assert ShardPlanner().frozen(model).parameters.keys() == once == free.whole.keys() - shard.whole.keys()
    assert shard.trained().keys() == free.trained().keys() - {"0.weight", "2.bias", "4.u", "4.v"}
    returned = shard.read_from(client)
    values = sum(shard.state()[name].numel() for name in ("4.u", "4.v", "4.multipliers"))
    assert shard.nbytes - returned.nbytes > 4 * values
    assert returned.nbytes == len(returned.to_bytes())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in names)


class Complex(nn.Sequential):
    """A net with a complex parameter, and state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.phases = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def get_extra_state(self):
        return {"words": 3}

    def set_extra_state(self, state):
        pass


def test_round_with_complex_parameters_averages_them():
    torch.manual_seed(0)
    model = Complex()
    before = model.phases.detach().clone()
    shard, client = round_of(model)
    assert shard.whole["phases"].shape == (4, 2)
    torch.testing.assert_close(model.phases, client.phases)
    torch.testing.assert_close(model.phases, before + 0.5)


class Hashed(nn.Module):
    """Looks its inputs up by a random table that the state dict has, and hides some of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randint(4, (9,)))
        self.register_buffer("mask", torch.rand(4) < 0.5)
        self.vectors = nn.Embedding(4, 4)

    def forward(self, ids):
        return self.vectors(self.table[ids]) * self.mask


def test_integer_and_bool_buffers_are_sent_but_not_averaged():
    torch.manual_seed(0)
    server, ids = nn.Sequential(Hashed(), nn.Linear(4, 4)), torch.arange(9)
    plan = make_plan(server, {0: 1.0}, "dense")
    assert {"0.table", "0.mask"} <= plan.shard(0).fixed
    before = {name: tensor.clone() for name, tensor in server.state_dict().items()}
    client = client_model(nn.Sequential(Hashed(), nn.Linear(4, 4)), Shard.from_bytes(plan.shard(0).to_bytes()))
    assert not torch.equal(Hashed().table, server[0].table)
    torch.testing.assert_close(client(ids), server(ids))
    client[0].table.zero_()
    client[0].vectors.weight.data += 1.0
    update = Update.from_bytes(plan.shard(0).read_from(client).to_bytes())
    assert not {"0.table", "0.mask"} & update.whole.keys()
    assert aggregate(server, plan, {0: update}, {0: 1}).accepted == [0]
    assert torch.equal(server[0].table, before["0.table"])
    torch.testing.assert_close(server[0].vectors.weight, before["0.vectors.weight"] + 1.0)
    plan.shard(0).load_into(client)
    assert torch.equal(client[0].table, server[0].table)


def test_from_bytes_of_trainable_integers_raises():
    with pytest.raises(UserError, match=r"unknown entry 'dense/table', torch.int32"):
        Shard.from_bytes(file_of({"dense/table": torch.ones(3, dtype=torch.int32)}))


def test_dense_state_has_all_but_counters_and_extra_state():
    state, frozen = whole_state(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), Complex()), {})
    expected = {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert expected == {name for name in state if not name.startswith("2.")}
    assert "2._extra_state" not in state
    assert frozen == {}
    assert Shard({}, state).nbytes > 4 * sum(tensor.numel() for tensor in state.values())


MISFITS = {
    "another number of terms": (lambda: factorize(make_net(), 0.5), r"1 has 4 terms, not 1; 4 has 4 terms, not 1; 6 "),
    "not factorized": (make_net, "1 is a Conv2d, not factorized; 4 is a Conv2d, not factorized; 6 is a Linear"),
    "missing": (
        lambda: factorize(make_net(), 0.1)[:-2],
        "6 is not there; 6.bias is not there; 7.weight is not there; 7.bias is not there",
    ),
    "too many": (
        lambda: factorize(make_net(), 0.1).append(nn.Linear(3, 1)),
        "8.weight is not in the shard; 8.bias is not in the shard",
    ),
    "other shapes": (
        lambda: factorize(nn.Sequential(*make_net()[:7], nn.Linear(10, 5)), 0.1),
        r"7.weight has shape \(5, 10\), not \(3, 10\); 7.bias has shape \(5,\)",
    ),
}


@pytest.mark.parametrize(("build", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_load_into_an_unfit_model_reports_all_and_changes_nothing(build, message):
    shard, model = make_plan(make_net(), {0: 0.1}).shard(0), build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for put in (shard.load_into, shard.read_from):
        with pytest.raises(UserError, match=message) as raised:
            put(model)
        assert "keep ratio 0.1" in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_repr_of_plan_and_shard_is_one_line():
    plan = make_plan(make_net(), {0: 0.3, 1: 0.5})
    shard = plan.shard(0)
    terms = sum(len(part.indices) for part in shard.terms.values())
    start, size = plan.id[:7], f"{shard.nbytes / 1000:.0f} kB"
    assert repr(shard) == f"Shard(keep_ratio=0.3, layers=3, terms={terms}, {size}, plan_id='{start}')"
    assert repr(plan) == f"Plan(clients=2, layers=3, {plan.nbytes / 1000:.0f} kB)"
    assert repr(Shard({}, {})) == "Shard(keep_ratio=1, layers=0, terms=0, 0 kB, plan_id='')"
