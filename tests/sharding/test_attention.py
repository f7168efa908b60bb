"""Unpacked attention against `nn.MultiheadAttention`, in float64."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from sharding import (
    ShardPlanner,
    UserError,
    client_model,
    factorize,
    load_factorized,
    merge,
    save_factorized,
    unpack_attention,
)
from sharding.layers import UnpackedAttention

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
def test_unpacked_attention_with_any_mask_equals_multihead_attention(kind, mask, options):
    packed, inputs = make(kind)
    unpacked = UnpackedAttention(packed)
    arguments = mask_arguments(mask) | options
    expected, weights = packed(*inputs, **arguments)
    actual, ours = unpacked(*inputs, **arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert (ours is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(ours, weights, rtol=0, atol=1e-12)


def test_unpacked_attention_with_unbatched_inputs_equals_multihead_attention():
    packed, inputs = make({"batch_first": True}, batch=1)
    inputs, padding = [x[0] for x in inputs], torch.tensor([False, False, False, True, False])
    expected, actual = (each(*inputs, key_padding_mask=padding) for each in (packed, UnpackedAttention(packed)))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_to_packed_of_unpacked_attention_restores_the_state(kind):
    packed, _ = make(kind)
    again = UnpackedAttention(packed).to_packed()
    torch.testing.assert_close(again.state_dict(), packed.state_dict(), rtol=0, atol=0)
    assert (again.training, again.batch_first, again.dropout) == (False, packed.batch_first, packed.dropout)


def test_unpacked_attention_dropout_acts_only_in_training():
    packed, inputs = make({"dropout": 0.5})
    unpacked = UnpackedAttention(packed)
    assert torch.equal(unpacked(*inputs)[0], unpacked(*inputs)[0])
    unpacked.train()
    for need_weights in (True, False):
        one, other = (unpacked(*inputs, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(one, other)


def test_unpacked_attention_with_unsupported_options_raises():
    for kind in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(UserError, match="add_bias_kv or add_zero_attn"):
            UnpackedAttention(nn.MultiheadAttention(8, 2, **kind))
    packed, inputs = make({})
    with pytest.raises(UserError, match="is_causal=True needs attn_mask"):
        UnpackedAttention(packed)(*inputs, is_causal=True)
    with pytest.raises(UserError, match="attn_mask has 3 matrices, not 4, one per sample and head"):
        UnpackedAttention(packed)(*inputs, attn_mask=torch.zeros(3, 3, 5).double())


def test_planner_of_an_unpacked_model_shards_each_projection():
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2))
    with pytest.raises(UserError, match=r"1\.self_attn: nn\.MultiheadAttention packs.*call sharding\.unpack_attention"):
        ShardPlanner().plan(model, {0: 0.5})
    server = unpack_attention(model)
    shard = ShardPlanner().plan(server, {0: 0.5}).shard(0)
    assert {f"1.self_attn.{p}_proj" for p in ("q", "k", "v", "out")} < set(shard.terms)
    shard.load_into(factorize(model, 0.5))


@pytest.mark.parametrize("inplace", [False, True])
def test_factorize_of_a_lone_attention_equals_it(inplace, tmp_path):
    packed, inputs = make({})
    expected = packed(*inputs)[0]
    with pytest.raises(UserError, match=r"cannot factorize the model itself: nn\.MultiheadAttention packs"):
        ShardPlanner(skip=()).plan(packed, {0: 1.0})
    shard = ShardPlanner("full", skip=()).plan(unpack_attention(packed), {0: 1.0}).shard(0)
    made = client_model(packed, shard)
    small = factorize(packed, 1.0, skip=(), inplace=inplace)
    assert set(small.factorize_report.layers) == {"q_proj", "k_proj", "v_proj", "out_proj"}
    save_factorized(small, tmp_path)
    for each in (made, small, merge(small), load_factorized(tmp_path, packed)):
        torch.testing.assert_close(each(*inputs)[0], expected, rtol=0, atol=1e-10)
    assert type(merge(small)) is nn.MultiheadAttention


def encoder(depth=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, **options).double()
    return nn.TransformerEncoder(layer, depth)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_factorized_encoder_with_padding_in_eval_mode_equals_the_encoder():
    """Its nested tensors do; they are put off, and back on by `merge`."""
    model, x = encoder().eval(), torch.randn(2, 5, 8).double()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        small = factorize(model, 1.0)
        actual = small(x, src_key_padding_mask=padding)
        merged = merge(small)
        again = merged(x, src_key_padding_mask=padding)
    valid = ~padding
    torch.testing.assert_close(actual[valid], expected[valid], rtol=0, atol=1e-10)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-10)
    assert (model.use_nested_tensor, small.use_nested_tensor, merged.use_nested_tensor) == (True, False, True)
    assert vars(merged).keys() == vars(model).keys()


def test_skipped_attention_stays_packed_and_the_fast_path_is_correct():
    model, x = encoder().eval(), torch.randn(2, 5, 8).double()
    for skip in ("self_attn", nn.MultiheadAttention, ["layers.*.self_attn"]):
        small = factorize(model, 1.0, skip)
        assert type(small.layers[0].self_attn) is nn.MultiheadAttention
        assert set(small.factorize_report.layers) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
        with torch.no_grad():
            torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-10)


class Doubling(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(2 * query, key, value, **options)


def pruned(part, name):
    attention = nn.MultiheadAttention(8, 2)
    prune.l1_unstructured(attention.get_submodule(part), name, 0.5)
    return attention


COMPUTED = "a weight of it is computed (parametrized, normalized or pruned)"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: pruned("", "in_proj_weight"), COMPUTED),
        (lambda: pruned("out_proj", "weight"), COMPUTED),
        (lambda: Doubling(8, 2), "Doubling may compute something else"),
        (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "it has add_bias_kv or add_zero_attn"),
    ],
)
def test_attention_that_cannot_be_unpacked_stays_dense_and_is_reported(make, reason):
    model = nn.ModuleDict({"attn": make(), "mlp": nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))})
    small = factorize(model, 0.25, skip="mlp.0")
    assert type(small["attn"]) is type(model["attn"])
    assert small.factorize_report.unfactorized["attn.out_proj"] == f"in a packed attention: {reason}"
    plan = ShardPlanner(skip="mlp.0").plan(model, {0: 0.25})
    assert plan.spectra.keys() == small.factorize_report.layers.keys()


def test_attention_with_a_tied_weight_stays_packed_and_tied():
    mlp = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "mlp": mlp})
    model["mlp"][1].weight = model["attn"].out_proj.weight
    small = factorize(model, 0.25, skip=())
    assert small["mlp"][1].weight is small["attn"].out_proj.weight
    assert small.factorize_report.unfactorized["attn.out_proj"] == "in a packed attention: it is tied to mlp.1.weight"


def test_unpacked_attention_keeps_requires_grad_attributes_and_hooks():
    packed, inputs = make({})
    packed.requires_grad_(False)
    packed.out_proj.weight.requires_grad_(True)
    packed.note, seen = "kept", []
    packed.register_forward_hook(lambda *_: seen.append("forward"))
    unpacked = UnpackedAttention(packed)
    assert {name for name, part in unpacked.named_parameters() if part.requires_grad} == {"out_proj.weight"}
    again = unpacked.to_packed()
    assert {name for name, part in again.named_parameters() if part.requires_grad} == {"out_proj.weight"}
    for attention in (unpacked, again):
        assert (attention.note, attention.head_dim, attention.kdim) == ("kept", 4, 8)
        attention(*inputs)
    assert seen == ["forward", "forward"]
