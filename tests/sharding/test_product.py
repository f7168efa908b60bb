"""The products of large linear layers, whose gradients are computed in strips, against torch's own."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F

from sharding import FactorizedLinear
from sharding.layers import product

TOLERANCE = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def strips(monkeypatch):
    """Takes every layer for a large one, and counts the gradients computed in strips."""
    count = []
    bmm = torch.bmm
    monkeypatch.setattr(product, "LARGE", 0)
    monkeypatch.setattr(torch, "bmm", lambda a, b: count.append(1) or bmm(a, b))
    return count


def layer(wide=512, narrow=256):
    torch.manual_seed(0)
    made = FactorizedLinear(wide, narrow, 3, dtype=torch.float64)
    torch.nn.init.normal_(made.bias)
    made.multipliers.copy_(torch.tensor([3.0, 1.0, 0.5]))
    return made


def plain(x, layer):
    return F.linear(x @ layer.v * layer.multipliers, layer.u, layer.bias)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 2, 2), (1,), (), (0,)], ids=str)
@pytest.mark.parametrize("sizes", [(512, 256), (768, 100)])
def test_outputs_and_gradients_are_torchs(strips, shape, sizes):
    made = layer(*sizes)
    x = torch.randn(*shape, sizes[0], dtype=torch.float64, requires_grad=True)
    y, expected = made(x), plain(x, made)
    torch.testing.assert_close(y, expected, **TOLERANCE)
    probe = torch.randn_like(y)
    inputs = [x, made.u, made.v, made.bias]
    of = torch.autograd.grad(expected, inputs, probe)
    assert not strips
    torch.testing.assert_close(torch.autograd.grad(y, inputs, probe), of, **TOLERANCE)
    samples = x[..., 0].numel()
    assert len(strips) == (samples >= 4) * sum(size % 256 == 0 for size in sizes)


def test_a_layer_is_large_by_its_factors(strips, monkeypatch):
    monkeypatch.setattr(product, "LARGE", 1024)
    made = layer()
    made(torch.randn(5, 512).double()).sum().backward()
    assert len(strips) == 1  # of v, 512×3, and not of u, 256×3
    with torch.autocast("cpu", torch.bfloat16):
        made.float()(torch.randn(5, 512)).float().sum().backward()
    assert len(strips) == 1


def test_what_is_frozen_gets_no_gradient(strips):
    made, x = layer(), torch.randn(5, 512).double()
    made.v.requires_grad_(False)
    made(x).sum().backward()
    assert made.v.grad is None
    assert len(strips) == 1
    frozen = layer().requires_grad_(False)
    x.requires_grad_()
    frozen(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(plain(x, frozen).sum(), x)[0], **TOLERANCE)
    assert len(strips) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:`torch.jit")
def test_derivatives_of_every_kind_are_torchs(strips):
    made, x, change = layer(), torch.randn(6, 512).double(), torch.randn(6, 512).double()
    factors = {name: part.detach() for name, part in made.named_parameters()}
    assert torch.autograd.gradcheck(
        lambda x, u: functional_call(made, {"u": u}, (x,)), (x.requires_grad_(), made.u), fast_mode=True
    )
    assert torch.autograd.gradgradcheck(lambda x, v: functional_call(made, {"v": v}, (x,)), (x, made.v), fast_mode=True)
    x = x.detach()

    def loss(factors, x, forward=made):
        return functional_call(made, factors, (x,)).square().sum()

    def plain_loss(factors, x):
        y = F.linear(x @ factors["v"] * made.multipliers, factors["u"], factors["bias"])
        return y.square().sum()

    each = [vmap(grad(f), in_dims=(None, 0))(factors, x.view(1, 6, 512)) for f in (loss, plain_loss)]
    torch.testing.assert_close(*each, **TOLERANCE | {"atol": 1e-8})
    along = [jvp(lambda x, f=f: f(factors, x), (x,), (change,)) for f in (loss, plain_loss)]
    torch.testing.assert_close(*along, **TOLERANCE | {"atol": 1e-8})
    curves = [hessian(lambda b, f=f: f(factors | {"bias": b}, x))(factors["bias"]) for f in (loss, plain_loss)]
    torch.testing.assert_close(*curves, **TOLERANCE | {"atol": 1e-8})
    assert strips


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiled_exported_and_traced_layers_go_without(strips):
    made, x = layer(), torch.randn(6, 512).double()
    expected = made(x)
    for other in (
        torch.compile(made, fullgraph=True, backend="aot_eager"),
        torch.export.export(made, (x,)).module(),
        torch.jit.trace(made, (x,)),
        torch.jit.script(made),
        torch.fx.symbolic_trace(made),
    ):
        torch.testing.assert_close(other(x), expected)
