"""Factorized layers against the dense layers they stand for, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sharding import FactorizedConv2d, FactorizedLinear, UserError
from sharding.svd.spectrum import decompose_one

TOLERANCE = 1e-10

CONVS = [
    {"kernel_size": 3},
    {"kernel_size": 1, "bias": False},
    {"kernel_size": (3, 1), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2},
    {"kernel_size": (3, 5), "padding": "same", "dilation": (1, 2)},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": (2, 1), "padding_mode": "circular"},
    {"kernel_size": (2, 5), "padding": "same", "padding_mode": "reflect"},
]


def dense_layers():
    torch.manual_seed(0)
    yield nn.Linear(7, 5).double(), torch.randn(4, 2, 7).double()
    yield nn.Linear(5, 9, bias=False).double(), torch.randn(4, 5).double()
    for geometry in CONVS:
        yield nn.Conv2d(3, 8, **geometry).double(), torch.randn(2, 3, 9, 8).double()


DENSE_LAYERS = [pytest.param(*case, id=f"{index}-{case[0]._get_name()}") for index, case in enumerate(dense_layers())]


def kind(layer):
    return FactorizedLinear if isinstance(layer, nn.Linear) else FactorizedConv2d


@pytest.mark.parametrize(("layer", "x"), DENSE_LAYERS)
def test_all_terms_equal_the_dense_layer_in_output_and_gradients(layer, x):
    rank = min(layer.weight.flatten(1).shape)
    factorized = kind(layer).from_dense(layer, rank)
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = layer(x), factorized(y)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)

    probe = torch.randn_like(expected)
    (expected * probe).sum().backward()
    (actual * probe).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=TOLERANCE)
    if layer.bias is not None:
        torch.testing.assert_close(factorized.bias.grad, layer.bias.grad, rtol=0, atol=TOLERANCE)
    # The chain rule through W = UΩVᵀ: ∂L/∂U = ∂L/∂W·VΩ, ∂L/∂V = (∂L/∂W)ᵀ·UΩ.
    gradient = layer.weight.grad.flatten(1)
    torch.testing.assert_close(factorized.u.grad, gradient @ factorized.v.detach(), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(factorized.v.grad, gradient.mT @ factorized.u.detach(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("layer", "x"), DENSE_LAYERS)
def test_some_terms_and_multipliers_equal_their_composed_matrix(layer, x):
    factorized = kind(layer).from_dense(layer, 2)
    factorized.multipliers.copy_(torch.tensor([3.0, 0.5]))
    spectrum = decompose_one(layer.weight.flatten(1))
    weight = 3 * spectrum.u[:, :1] @ spectrum.v[:, :1].mT + 0.5 * spectrum.u[:, 1:2] @ spectrum.v[:, 1:2].mT
    composed = factorized.to_dense()
    torch.testing.assert_close(composed.weight.flatten(1), weight, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(factorized.weight, composed.weight.detach(), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(factorized(x), composed(x), rtol=0, atol=TOLERANCE)
    assert repr(composed) == repr(layer)


@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    seed=st.integers(0, 2**16),
)
def test_any_convolution_survives_the_round_trip(kernel, stride, padding, dilation, channels, seed):
    torch.manual_seed(seed)
    layer = nn.Conv2d(*channels, kernel, stride, padding, dilation).double()
    x = torch.randn(2, channels[0], 7, 8).double()
    factorized = FactorizedConv2d.from_dense(layer, min(layer.weight.flatten(1).shape))
    torch.testing.assert_close(factorized(x), layer(x), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(factorized.to_dense().weight, layer.weight, rtol=0, atol=TOLERANCE)


def test_multipliers_are_saved_but_never_trained():
    layer = FactorizedLinear(4, 3, 2)
    assert set(layer.state_dict()) == {"u", "v", "bias", "multipliers"}
    assert "multipliers" not in dict(layer.named_parameters())


def test_half_precision_merges_without_drift():
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    merged = FactorizedLinear.from_dense(layer, 64).to_dense()
    # Each factor is rounded to bfloat16 once (2⁻⁹ relative); the sum over terms adds nothing visible to that.
    error = torch.linalg.norm((merged.weight - layer.weight).double()) / torch.linalg.norm(layer.weight.double())
    assert error < 2**-8


def test_a_new_layer_starts_with_the_variance_of_the_dense_default():
    torch.manual_seed(0)
    matrix = FactorizedLinear(300, 400, 50).matrix()
    expected = nn.Linear(300, 400).weight.var()
    assert matrix.var().item() == pytest.approx(expected.item(), rel=0.1)


@pytest.mark.parametrize("num_terms", [0, 4, -1])
def test_a_number_of_terms_outside_the_rank_is_reported(num_terms):
    with pytest.raises(UserError, match=rf"num_terms is {num_terms}, but a matrix of 3×7 has 1 to 3 terms"):
        FactorizedLinear.from_dense(nn.Linear(7, 3), num_terms)


def test_other_modules_are_refused():
    with pytest.raises(UserError, match=r"from an nn\.Conv2d, not a Linear"):
        FactorizedConv2d.from_dense(nn.Linear(4, 4), 1)
    with pytest.raises(UserError, match=r"from an nn\.Linear, not a Conv2d"):
        FactorizedLinear.from_dense(nn.Conv2d(4, 4, 1), 1)
