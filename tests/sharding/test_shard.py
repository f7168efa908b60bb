"""The wire form, and the way in and out of a client's model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding import Shard, factorize
from sharding.shard import Terms, dense_state, update_norm
from tests.sharding.models import make_net, make_plan, perturbed


def assert_same(one: Shard, other: Shard) -> None:
    assert one.terms.keys() == other.terms.keys()
    assert one.dense.keys() == other.dense.keys()
    for name, terms in one.terms.items():
        for part in ("indices", "u", "v", "multipliers"):
            assert torch.equal(getattr(terms, part), getattr(other.terms[name], part))
    for name, tensor in one.dense.items():
        assert torch.equal(tensor, other.dense[name])


def test_the_wire_form_comes_back_the_same_and_nbytes_is_its_length():
    for shard in make_plan(make_net(), {"a": 0.3, "b": 1.0}).values():
        data = shard.to_bytes()
        assert len(data) == shard.nbytes
        assert_same(Shard.from_bytes(data), shard)


@given(
    layers=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1),
        st.integers(1, 40),
        max_size=4,
    ),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    dense=st.integers(0, 12),
)
def test_nbytes_is_exact_for_any_names_sizes_and_types(layers, dtype, dense):
    terms = {
        name: Terms(torch.arange(n), torch.ones(3, n, dtype=dtype), torch.ones(5, n, dtype=dtype), torch.ones(n))
        for name, n in layers.items()
    }
    shard = Shard(terms, {f"layer{i}.bias": torch.ones(10**i % 1001, dtype=torch.float32) for i in range(dense)})
    data = shard.to_bytes()
    assert len(data) == shard.nbytes
    assert_same(Shard.from_bytes(data), shard)


def test_a_dense_shard_holds_the_whole_floating_point_state():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
    state = dense_state(net, {})
    assert set(state) == {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert Shard({}, state).nbytes > 4 * sum(tensor.numel() for tensor in state.values())


@pytest.mark.parametrize("keep_ratio", [0.3, 1.0])
def test_a_shard_goes_into_a_client_model_and_comes_back(keep_ratio):
    server = make_net()
    shard = make_plan(server, {0: keep_ratio}, "unbiased")[0]
    client = factorize(make_net(), keep_ratio)
    with torch.no_grad():
        for parameter in client.parameters():
            parameter.fill_(7.0)
    shard.load_into(client)
    assert_same(shard.read_from(client), shard)
    for name, terms in shard.terms.items():
        assert torch.equal(client.get_submodule(name).multipliers, terms.multipliers)


def test_a_client_with_all_terms_computes_what_the_server_computes():
    server, x = make_net(), torch.randn(2, 1, 4, 4)
    client = factorize(make_net(), 1.0)
    make_plan(server, {0: 1.0}, "full")[0].load_into(client)
    torch.testing.assert_close(client(x), server(x), rtol=1e-5, atol=1e-6)


def test_what_is_read_back_does_not_change_with_the_resident_model():
    client = factorize(make_net(), 0.5)
    shard = make_plan(make_net(), {0: 0.5})[0]
    shard.load_into(client)
    returned = shard.read_from(client)
    perturbed(shard, 1).load_into(client)
    assert_same(returned, shard)


def test_the_norm_of_an_update_is_that_of_all_that_changed():
    model = make_net().double()
    sent = make_plan(model, {"a": 0.5})["a"]
    returned = perturbed(sent, 3)
    squares = sum(((returned.dense[n] - t) ** 2).sum() for n, t in sent.dense.items())
    for name, terms in sent.terms.items():
        after = returned.terms[name]
        squares += ((after.u - terms.u) ** 2).sum() + ((after.v - terms.v) ** 2).sum()
    torch.testing.assert_close(update_norm(sent, returned), squares.sqrt(), rtol=1e-12, atol=0)
    assert update_norm(sent, sent) == 0


def test_the_norm_has_the_same_bits_whether_the_update_has_travelled():
    sent = make_plan(make_net(), {0: 0.5})[0]
    for seed in range(20):
        returned = perturbed(sent, seed)
        turned = Shard(dict(reversed(returned.terms.items())), dict(reversed(returned.dense.items())))
        norm = update_norm(sent, returned)
        assert torch.equal(update_norm(sent, turned), norm)
        assert torch.equal(update_norm(sent, Shard.from_bytes(returned.to_bytes())), norm)
