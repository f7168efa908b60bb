"""Factorized layers against the dense layers they stand for, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sharding import FactorizedConv2d, FactorizedLinear, UserError

TOLERANCE = 1e-10


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
