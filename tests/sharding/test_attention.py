"""Unpacked attention against `nn.MultiheadAttention`, in float64."""

from itertools import product

import pytest
import torch
from torch import nn

from sharding import ShardPlanner, UnpackedAttention, UserError, factorize, unpack_attention

MASKS = ["none", "float", "bool", "per head", "padding", "padding and float"]
KINDS = [{}, {"bias": False}, {"batch_first": True}, {"kdim": 6, "vdim": 10, "batch_first": True}]


def make(kind, queries=3, keys=5, batch=2):
    """(packed attention, inputs) with random biases."""
    torch.manual_seed(0)
    packed = nn.MultiheadAttention(8, 2, **kind).double().eval()
    with torch.no_grad():
        for parameter in packed.parameters():
            nn.init.normal_(parameter)
    shapes = [(batch, queries, 8), (batch, keys, kind.get("kdim", 8)), (batch, keys, kind.get("vdim", 8))]
    inputs = [torch.randn(shape).double() for shape in shapes]
    return packed, inputs if kind.get("batch_first") else [x.transpose(0, 1) for x in inputs]


def mask_arguments(mask, queries=3, keys=5, batch=2, heads=2):
    floats = torch.randn(queries, keys).double()
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, -2:] = True
    return {
        "none": {},
        "float": {"attn_mask": floats},
        "bool": {"attn_mask": torch.ones(queries, keys, dtype=torch.bool).triu(1)},
        "per head": {"attn_mask": torch.randn(batch * heads, queries, keys).double()},
        "padding": {"key_padding_mask": padding},
        "padding and float": {"attn_mask": floats, "key_padding_mask": padding.double() * -2},
    }[mask]


@pytest.mark.parametrize(("kind", "mask"), list(product(KINDS, MASKS)), ids=str)
@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_it_computes_what_the_packed_attention_does(kind, mask, options):
    packed, inputs = make(kind)
    unpacked = UnpackedAttention.from_packed(packed)
    arguments = mask_arguments(mask) | options
    expected, weights = packed(*inputs, **arguments)
    actual, ours = unpacked(*inputs, **arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    if weights is None:
        assert ours is None
    else:
        torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)


def test_inputs_without_a_batch():
    packed, inputs = make({"batch_first": True}, batch=1)
    inputs = [x[0] for x in inputs]
    padding = torch.tensor([False, False, False, True, False])
    for expected, actual in zip(
        packed(*inputs, key_padding_mask=padding),
        UnpackedAttention.from_packed(packed)(*inputs, key_padding_mask=padding),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packing_undoes_it(kind):
    packed, _ = make(kind)
    again = UnpackedAttention.from_packed(packed).to_packed()
    assert again.state_dict().keys() == packed.state_dict().keys()
    assert all(torch.equal(tensor, packed.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert (again.training, again.batch_first, again.dropout) == (False, packed.batch_first, packed.dropout)


def test_dropout_acts_in_training_alone():
    packed, inputs = make({"dropout": 0.5})
    unpacked = UnpackedAttention.from_packed(packed)
    assert torch.equal(unpacked(*inputs)[0], unpacked(*inputs)[0])
    unpacked.train()
    for need_weights in (True, False):
        one, other = (unpacked(*inputs, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(one, other)


def test_what_is_not_supported_is_told():
    for kind in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(UserError, match="add_bias_kv or add_zero_attn"):
            UnpackedAttention.from_packed(nn.MultiheadAttention(8, 2, **kind))
    packed, inputs = make({})
    with pytest.raises(UserError, match="is_causal=True needs attn_mask"):
        UnpackedAttention.from_packed(packed)(*inputs, is_causal=True)


def test_the_planner_shards_each_projection_of_an_unpacked_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2))
    with pytest.raises(UserError, match=r"call sharding\.unpack_attention first"):
        ShardPlanner().plan(model, {0: 0.5})
    server = unpack_attention(model)
    shard = ShardPlanner().plan(server, {0: 0.5})[0]
    assert {f"1.self_attn.{p}_proj" for p in ("q", "k", "v", "out")} < set(shard.terms)
    shard.load_into(factorize(model, 0.5))
