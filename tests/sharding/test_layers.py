"""Factorized layers against the dense layers they stand for, in float64."""

import pytest
import torch
from torch import nn

from sharding import FactorizedConv, FactorizedLinear, UserError

TOLERANCE = 1e-10


def test_multipliers_are_saved_but_never_trained():
    layer = FactorizedLinear.from_dense(nn.Linear(4, 3), 2)
    assert set(layer.state_dict()) == {"u", "v", "bias", "multipliers"}
    assert "multipliers" not in dict(layer.named_parameters())


def test_half_precision_merges_without_drift():
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    merged = FactorizedLinear.from_dense(layer, 64).to_dense()
    # Each factor is rounded to bfloat16 once (2⁻⁹ relative); the sum over terms adds nothing visible to that.
    error = torch.linalg.norm((merged.weight - layer.weight).double()) / torch.linalg.norm(layer.weight.double())
    assert error < 2**-8


@pytest.mark.parametrize("num_terms", [0, 4, -1])
def test_a_number_of_terms_outside_the_rank_is_reported(num_terms):
    with pytest.raises(UserError, match=rf"num_terms is {num_terms}, but a matrix of 3×7 has 1 to 3 terms"):
        FactorizedLinear.from_dense(nn.Linear(7, 3), num_terms)


def test_other_modules_are_refused():
    with pytest.raises(UserError, match=r"from an nn\.Conv1d or Conv2d or Conv3d, not a Linear"):
        FactorizedConv.from_dense(nn.Linear(4, 4), 1)
    with pytest.raises(UserError, match=r"from an nn\.Linear, not a Conv2d"):
        FactorizedLinear.from_dense(nn.Conv2d(4, 4, 1), 1)
