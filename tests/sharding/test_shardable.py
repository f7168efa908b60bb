"""Which layers are factorized: what the caller asks for, and what a layer allows."""

import pytest
import torch
from torch import nn

from sharding import ShardPlanner, factorize, merge, shardable_layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"q": nn.Linear(4, 4), "proj": nn.Linear(4, 4)})
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.mlp(self.attn["proj"](self.attn["q"](x)))


def blocks(count=4):
    torch.manual_seed(0)
    return nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.Sequential(*(Block() for _ in range(count)))})


def chain(width=8, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ((), 0),
        ("first", 1),
        (["first", "last", "mlp"], 9),
        ("stem", 1),
        ("attn", 8),
        ("*.attn", 8),
        ("blocks.*.attn", 8),
        ("mlp", 8),
        ("blocks.?", 16),
        ("blocks.0", 4),
        ("blocks.0.*", 4),
        ("mlp.0", 4),
        ("blocks.0.mlp.0", 1),
        ("attn.q", 4),
        (Block, 16),
        (nn.GELU, 0),  # nothing to skip, but no misspelling
        (nn.Linear, 17),
        (lambda name, layer: layer.out_features == 8, 4),
        (lambda name, layer: name.endswith(".q"), 4),
    ],
    ids=lambda value: getattr(value, "__name__", None),  # not its address, which differs from worker to worker
)
@pytest.mark.filterwarnings("ignore:.* factorized", "ignore:no layer of this")
def test_skip_patterns_match_layers_or_enclosing_modules(pattern, count):
    model = blocks()
    left = shardable_layers(model, pattern).keys()
    assert 17 - len(left) == count
    assert shardable_layers(model, pattern if isinstance(pattern, tuple | list) else [pattern]).keys() == left
    assert factorize(model, 0.5, pattern).factorize_report.layers.keys() == left
    assert ShardPlanner(skip=pattern).plan(model, {0: 0.5}).spectra.keys() == left


def test_layer_registered_twice_matches_by_either_name():
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "s": shared, "box": nn.ModuleList([shared]), "b": nn.Linear(8, 8)})
    for pattern in ("s", "box", "box.0", "b?x.*", nn.ModuleList, lambda name, layer: name == "box.0"):
        assert list(shardable_layers(model, pattern)) == ["a", "b"]
        assert set(factorize(model, {pattern: 0.25}, skip=()).factorize_report.layers) == {"s"}
    model.ends = ("box", "b")
    assert list(shardable_layers(model)) == ["a"]


def test_skip_of_first_or_last_prefers_a_module_of_that_name():
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "first", "b", "c")})
    assert list(shardable_layers(model, "first")) == ["a", "b", "c"]
    model.ends = [1, 2]  # another's attribute, which is ignored
    assert list(shardable_layers(model)) == ["a", "b"]
    model["last"] = nn.MultiheadAttention(8, 2)
    assert list(factorize(model, 0.25, "last").factorize_report.layers) == ["a", "first", "b", "c"]


def test_frozen_layers_stay_frozen_after_factorize_and_merge():
    model = chain()
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    small = factorize(model, 0.25, skip=())
    flags = {name: parameter.requires_grad for name, parameter in small.named_parameters()}
    assert {name for name, trains in flags.items() if not trains} == {"1.u", "1.v", "2.bias"}
    assert not small[1].weight.requires_grad
    assert small[0].weight.requires_grad
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in merge(small).named_parameters()} == before


def test_hooks_and_attributes_are_kept_by_factorize_and_merge():
    model, seen = chain(), []
    model[1].register_forward_hook(lambda layer, args, output: seen.append("forward"))
    model[1].register_forward_pre_hook(lambda layer, args: seen.append("before"))
    model[1].register_full_backward_hook(lambda layer, inputs, outputs: seen.append("backward"))
    model[1].note = "kept"
    model[1].eval()
    small = factorize(model, 0.25)
    small(torch.randn(2, 8).requires_grad_()).sum().backward()
    assert seen == ["before", "forward", "backward"]
    merged = merge(small)
    for each in (small, merged):
        assert (each[1].note, each[1].training, each[2].training) == ("kept", False, True)
    seen.clear()
    merged(torch.randn(2, 8)).sum().backward()
    assert seen == ["before", "forward", "backward"]
    small[1].register_forward_hook(lambda *_: None)
    assert len(model[1]._forward_hooks) == 1


class Lora(nn.Module):
    """As peft wraps a layer."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, layer.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_factorize_of_a_lora_model_replaces_only_the_base_layers():
    model = nn.Sequential(*(Lora(nn.Linear(64, 64)) for _ in range(4)))
    small = factorize(model, 0.25)
    assert set(small.factorize_report.layers) == {"1.base_layer", "2.base_layer"}
    trained = {name for name, parameter in small.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_factorize_without_a_layer_to_replace_warns():
    with pytest.warns(UserWarning, match=r"nothing is factorized; what stays dense: LSTM\.weight_hh_l0 \d+"):
        factorize(nn.LSTM(4, 8), 0.5)
    small = factorize(chain(), 0.25)
    with pytest.warns(UserWarning, match="factorized already"):
        again = factorize(small, 0.1)
    assert again.factorize_report.unfactorized["1"] == "factorized already; merge first"


def test_module_named_base_layer_without_an_adapter_is_factorized():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())
            self.level = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3))
            self.fc = nn.Linear(16, 4)

    assert set(factorize(Tree(), 0.25, skip=("first", "last")).factorize_report.layers) == {"level.0", "level.1"}
