"""The weight of a factorized layer, which is composed only when it is used."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sharding import FactorizedConv2d, FactorizedLinear, UserError
from sharding.layers import base


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = FactorizedLinear(6, 5, 3, dtype=torch.float64)
    layer.multipliers.copy_(torch.tensor([2.0, 1.0, 0.5]))
    return layer


@pytest.fixture
def products(monkeypatch):
    """Counts compositions."""
    count = []
    monkeypatch.setattr(base, "compose", lambda *args: count.append(1) or torch.zeros(5, 6, dtype=torch.float64))
    return count


def test_reading_metadata_costs_no_product(layer, products):
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device.type, weight.ndim) == ((5, 6), torch.float64, "cpu", 2)
    assert (weight.size(0), weight.size(), weight.dim(), weight.numel(), len(weight)) == (5, (5, 6), 2, 30, 5)
    assert weight.requires_grad
    assert not weight.data.requires_grad
    assert weight.is_floating_point()
    assert weight.stride() == (6, 1)
    assert (weight.is_cuda, weight.layout, weight.element_size()) == (False, torch.strided, 8)
    assert isinstance(weight, torch.Tensor)
    assert weight.to is not None
    assert torch.is_floating_point(weight)
    assert products == []
    assert weight.sum() == 0
    assert products == [1]


def test_other_tensors_are_no_lazy_weights(layer):
    lazy = type(layer.weight)
    assert isinstance(layer.weight, lazy)
    assert not isinstance(torch.zeros(2), lazy)
    assert not isinstance(torch.nn.Parameter(torch.zeros(2)), lazy)


def test_it_trains_where_either_factor_does(layer):
    for trains in ((True, False), (False, True), (False, False)):
        for factor, each in zip((layer.u, layer.v), trains, strict=True):
            factor.requires_grad_(each)
        assert layer.weight.requires_grad == (layer.weight + 0).requires_grad == any(trains)


def test_it_computes_what_the_product_would(layer):
    dense = (layer.u * layer.multipliers) @ layer.v.mT
    torch.testing.assert_close(layer.weight, dense)
    torch.testing.assert_close(layer.weight.T @ layer.weight, dense.T @ dense)
    torch.testing.assert_close(torch.cat([layer.weight, dense]), torch.cat([dense, dense]))
    torch.testing.assert_close(layer.weight[1:, ::2].float(), dense[1:, ::2].float())
    assert repr(layer.weight) == repr(dense.view(5, 6))
    gradients = torch.autograd.grad(layer.weight.square().sum(), [layer.u, layer.v])
    for actual, expected in zip(gradients, torch.autograd.grad(dense.square().sum(), [layer.u, layer.v]), strict=True):
        torch.testing.assert_close(actual, expected)
    assert not layer.weight.detach().sum().requires_grad
    torch.testing.assert_close(copy.deepcopy(layer).weight, dense)


def test_functional_linear_goes_through_the_factors(layer, products):
    x, bias = torch.randn(2, 3, 6).double(), torch.randn(5).double()
    expected = x @ layer.v * layer.multipliers @ layer.u.T + bias
    torch.testing.assert_close(F.linear(x, layer.weight, bias), expected)
    torch.testing.assert_close(F.linear(x, layer.weight, bias=bias), expected)
    assert products == []


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.zero_(),
        lambda weight: weight.detach().mul_(2),
        nn.init.zeros_,
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: setattr(weight, "data", torch.zeros(5, 6)),
        lambda weight: weight.copy_(torch.zeros(5, 6)),
        lambda weight: torch.zeros(5, 6, out=weight),
        lambda weight: torch.mul(torch.ones(5, 6).double(), 2, out=weight),
        lambda weight: torch.max(torch.ones(2, 5, 6).double(), 0, out=(weight, torch.empty(5, 6).long())),
        nn.init.normal_,
        nn.init.uniform_,
        lambda weight: nn.init.constant_(weight, 1.0),
        nn.init.kaiming_uniform_,
        lambda weight: torch._foreach_mul_([weight], 2.0),
        lambda weight: torch._foreach_zero_([weight]),
        lambda weight: F.relu(weight, inplace=True),
        lambda weight: F.dropout(weight, inplace=True),
    ],
)
def test_writing_to_it_is_refused(layer, write):
    before = layer.weight.clone()
    with pytest.raises(UserError, match="would write to the weight of a factorized layer"):
        write(layer.weight)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(5, 6)), torch.zeros(5, 6), None], ids=type)
def test_setting_it_is_refused(layer, value):
    with pytest.raises(UserError, match=r"layer\.weight = … would write to the weight of a factorized layer"):
        layer.weight = value


def test_a_view_of_it_is_one_of_a_copy(layer):
    before = layer.weight.clone()
    with torch.no_grad():
        layer.weight[0].zero_()
    assert torch.equal(layer.weight, before)


def test_convolutions_have_one_too():
    layer = FactorizedConv2d(3, 4, 3, 2)
    assert layer.weight.shape == (4, 3, 3, 3)
    torch.testing.assert_close(layer.weight, layer.to_dense().weight.detach())


def test_compiled_code_may_read_it(layer):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x.to(self.layer.weight.dtype))

    x = torch.randn(2, 6)
    compiled = torch.compile(Reader(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x.double()))
