"""Replacing layers in a model, and undoing it."""

from itertools import product

import pytest
import torch
from torch import nn

from sharding import (
    Budget,
    FactorizedConv,
    FactorizedLinear,
    UserError,
    factorize,
    register_layer,
    shardable_layers,
)
from sharding.factorization import CoverageWarning
from sharding.layers.registry import factorize_empty
from sharding.terms.strategies import num_terms


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.Sequential(nn.Conv2d(6, 10, 3, stride=2), nn.ReLU(), nn.Conv2d(10, 8, 1, bias=False)),
        nn.Flatten(),
        nn.Linear(72, 12),
        nn.ReLU(),
        nn.Linear(12, 4),
    ).double()


def test_factorize_changes_a_copy_unless_inplace():
    model = small_model()
    copy = factorize(model, 0.5)
    assert copy is not model
    assert isinstance(model[4], nn.Linear)
    assert isinstance(copy[4], FactorizedLinear)
    assert factorize(model, 0.5, inplace=True) is model
    assert isinstance(model[4], FactorizedLinear)


def test_factorize_by_default_keeps_first_and_last_layers_dense():
    factorized = factorize(small_model(), 0.5)
    assert type(factorized[0]) is nn.Conv2d
    assert type(factorized[6]) is nn.Linear
    report = factorized.factorize_report
    kept = {name: (layer.rank, layer.num_terms) for name, layer in report.layers.items()}
    assert kept == {"2.0": (10, 5), "2.2": (8, 4), "4": (12, 6)}
    assert set(report.unfactorized) == {"0", "6"}
    assert report.parameters_before == sum(p.numel() for p in small_model().parameters())
    assert report.parameters_after == sum(p.numel() for p in factorized.parameters())
    assert "factorized 3 layers, kept 2 dense" in str(report)


def test_skip_pattern_without_a_match_raises_with_near_names():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)})
    with pytest.raises(UserError, match="'encodr' matches no layer; the nearest names are encoder, decoder"):
        factorize(model, 0.5, skip=["encodr"])
    with pytest.raises(UserError, match="'coder' matches no layer"):  # the end of a name, but not of its last part
        factorize(model, 0.5, skip="coder")


class Tied(nn.Module):
    """One of each thing that cannot be factorized."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def test_layers_that_cannot_be_factorized_stay_dense_and_are_reported():
    with pytest.warns(CoverageWarning, match=r"only 44\.1% of the parameters are factorized"):
        report = factorize(Tied(), 0.5, skip=()).factorize_report
    assert report.unfactorized == {
        "depthwise": "a single term a group (depthwise convolution)",
        "head": "its weight is tied to embed.weight",
    }
    assert sum(report.uncovered.values()) + sum(64 // 4 for _ in report.layers) == report.parameters_before
    assert report.uncovered["a single term a group (depthwise convolution)"] == 4 * 9 + 4
    assert report.uncovered["Embedding.weight"] == 20


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep_ratio": 2},
        {"keep_ratio": 0.5, "skip": "nothing"},
        {"keep_ratio": {"*": 0}},
        {"keep_ratio": Budget(parameters=3)},
        {"keep_ratio": 0.5, "residual_format": "int3"},
    ],
    ids=str,
)
def test_factorize_with_invalid_arguments_changes_nothing(arguments):
    model = Tied()
    before = repr(model)
    with pytest.raises(UserError):
        factorize(model, inplace=True, **({"skip": ()} | arguments))
    assert repr(model) == before


@pytest.mark.parametrize("keep_ratio", [torch.tensor(0.25), "0.5", [0.5], None, True])
def test_keep_ratio_that_is_no_number_raises(keep_ratio):
    kind = type(keep_ratio).__name__
    for given in (keep_ratio, {"4": keep_ratio}):
        with pytest.raises(
            UserError, match=rf"keep ratio .* is of type {kind}, not a number in \(0, 1\]; 0\.2 keeps a fifth"
        ):
            factorize(small_model(), given)


def test_num_terms_rounds_up_except_for_rounding_errors():
    assert [num_terms(10, ratio) for ratio in (0.01, 0.3, 0.31, 1.0)] == [1, 3, 4, 10]
    assert all(num_terms(rank, k / rank) == k for rank in range(1, 65) for k in range(1, rank + 1))
    for rank, tenths in product((10, 64, 4096), range(1, 11)):  # a ratio that went through float32 affords as many
        assert num_terms(rank, torch.tensor(tenths / 10).item()) == num_terms(rank, tenths / 10)


class Language(nn.Module):
    """Its first layer is an embedding, which is whole anyway, and it says so."""

    ends = ("tokens", "heads")

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.heads = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 2)])


def test_default_skip_uses_the_ends_of_a_model():
    assert list(shardable_layers(Language())) == ["body.0", "body.1"]
    assert list(shardable_layers(Language(), "first")) == ["body.0", "body.1", "heads.0", "heads.1"]
    wrong = Language()
    wrong.ends = ("tokens", "head")
    with pytest.raises(UserError, match=r"Language\.ends names 'head'"):
        shardable_layers(wrong)


def test_first_layer_of_a_model_with_an_embedding_is_the_embedding():
    body = [nn.Linear(4, 4), nn.Linear(4, 4)]
    assert list(shardable_layers(nn.Sequential(nn.LayerNorm(4), nn.Embedding(5, 4), *body))) == ["2"]
    assert list(shardable_layers(nn.Sequential(*body, nn.Embedding(5, 4)), "first")) == ["1"]


def test_factorize_on_meta_replaces_layers_or_raises():
    with torch.device("meta"):
        model = small_model()
    report = factorize(model, 0.5).factorize_report
    assert report.parameters_after == factorize(small_model(), 0.5).factorize_report.parameters_after
    small = factorize_empty(model, {"2.0": 3, "4": 2})
    assert isinstance(small[2][0], FactorizedConv)
    assert small[2][0].u.shape == (10, 3)
    assert small[4].v.shape == (72, 2)
    assert small[4].u.is_meta
    with pytest.raises(UserError, match="no layer 4x"):
        factorize_empty(model, {"4x": 1})
    with pytest.raises(UserError, match="layer 1 is a GroupNorm, which has no factorized form"):
        factorize_empty(model, {"1": 1})


def test_register_layer_of_a_subclass_factorizes_it():
    class MyLinear(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class MyFactorizedLinear(FactorizedLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    register_layer(MyLinear, MyFactorizedLinear)
    model, x = nn.Sequential(MyLinear(4, 4)), torch.randn(2, 4)
    factorized = factorize(model, 1.0, skip=())
    assert type(factorized[0]) is MyFactorizedLinear
    torch.testing.assert_close(factorized(x), model(x))
    with pytest.raises(UserError, match="is not a FactorizedLayer"):
        register_layer(MyLinear, nn.Linear)


@pytest.mark.parametrize("residual", [None, "int4"])
def test_factorize_in_inference_mode_makes_a_model_that_trains(residual):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with torch.inference_mode():
        small = factorize(model, 0.25, residual_format=residual)
    small(torch.ones(2, 8)).sum().backward()
    expected = factorize(model, 0.25, residual_format=residual).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in small.state_dict().items())


def test_warning_that_little_is_factorized_names_the_callers_line():
    with pytest.warns(CoverageWarning) as caught:
        factorize(nn.Sequential(nn.Linear(8, 8)), 0.25)
    assert caught[0].filename == __file__
