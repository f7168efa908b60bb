"""The computed `weight` of a factorized layer: metadata cost nothing, values are exact, writes raise."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sharding import UserError, factorize, merge
from sharding.layers import base


@pytest.fixture(params=[None, "int4"])
def layer(request):
    torch.manual_seed(0)
    return factorize(nn.Linear(6, 8), 0.5, skip=(), residual_format=request.param)


class CustomLinear(torch.autograd.Function):
    """Like the fused kernels of many packages: it takes the weight past torch's own functions."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


READS = {
    "linear": lambda x, w: F.linear(x, w),
    "row": lambda x, w: w[1:3].t() ** 2,
    "parts": lambda x, w: w.view(-1).split(7)[2] * w.chunk(2)[0].sum(),
    "own function": lambda x, w: CustomLinear.apply(x, w),
    "twice": lambda x, w: F.linear(F.linear(x, w), w.t()),
    "embedding": lambda x, w: F.embedding(torch.tensor([2, 2, 0]), w),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_weight_in_any_function_equals_the_product_and_gradients(layer, read):
    x = torch.randn(3, 6)
    gradients = []
    for weight in (layer.weight, layer.matrix()):
        made = read(x, weight)
        torch.testing.assert_close(made, read(x, layer.matrix()))
        layer.zero_grad()
        made.square().sum().backward()
        gradients.append([part.grad.clone() for part in (layer.u, layer.v)])
    torch.testing.assert_close(*gradients)


def test_weight_differentiated_twice_equals_the_product(layer):
    second = []
    for weight in (layer.weight, layer.matrix()):
        (first,) = torch.autograd.grad((weight**3).sum(), layer.u, create_graph=True)
        second.append(torch.autograd.grad(first.sum(), layer.v)[0])
    torch.testing.assert_close(*second)


def test_weight_metadata_read_computes_nothing(layer, monkeypatch):
    monkeypatch.setattr(base, "compose", None)
    weight = layer.weight
    assert (weight.dtype, weight.shape, weight.device) == (torch.float32, (8, 6), torch.device("cpu"))
    assert (weight.requires_grad, weight.ndim, weight.numel(), weight.is_meta) == (True, 2, 48, False)
    assert weight.detach().t().shape == weight.data.T.shape == (6, 8)


def test_weight_under_autocast_keeps_its_type(layer):
    expected = layer.matrix()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.weight.dtype == torch.float32
        assert torch.equal(layer.weight.clone(), expected)


def test_weight_has_the_same_gradients_where_backward_runs_under_autocast(layer):
    (expected,) = torch.autograd.grad(layer.weight.square().sum(), layer.u)
    with torch.autocast("cpu", torch.bfloat16):
        (gradient,) = torch.autograd.grad(layer.weight.square().sum(), layer.u)
    assert torch.equal(gradient, expected)


def add_to_data(layer):
    layer.weight.data += 1


WRITES = {
    "set data": lambda layer: setattr(layer.weight, "data", torch.zeros(8, 6)),
    "assign": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(8, 6))),  # fusing and tying do
    "add to data": add_to_data,
    "freeze": lambda layer: setattr(layer.weight, "requires_grad", True),
    "set gradient": lambda layer: setattr(layer.weight, "grad", torch.zeros(8, 6)),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.zeros(8, 6)),
    "a row": lambda layer: layer.weight[0].zero_(),
    "an entry": lambda layer: layer.weight.data.__setitem__((0, 0), 1.0),
    "flat": lambda layer: layer.weight.detach().view(-1)[3].fill_(1),
    "transposed": lambda layer: layer.weight.T.mul_(2),
    "part": lambda layer: layer.weight.data.chunk(2)[1].zero_(),
    "init": lambda layer: nn.init.ones_(layer.weight),
    "out": lambda layer: torch.mul(layer.weight.data, 2, out=layer.weight.data),
    "foreach": lambda layer: torch._foreach_add_([layer.weight.data], 1.0),
    "renormalized": lambda layer: F.embedding(torch.tensor([1]), layer.weight, max_norm=0.1),
    "from a vector": lambda layer: nn.utils.vector_to_parameters(torch.zeros(48), [layer.weight]),
    "hook": lambda layer: layer.weight.register_hook(print),
    "memory": lambda layer: layer.weight.untyped_storage().fill_(0),
    "dlpack": lambda layer: torch.from_dlpack(layer.weight.data).zero_(),
}


@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weight_written_to_raises(layer, write, gradients):
    with torch.set_grad_enabled(gradients), pytest.raises(UserError, match=r"would be lost.*sharding.merge\(model\)"):
        write(layer)


BELOW = {
    "swap": lambda weight: torch.utils.swap_tensors(weight, torch.zeros(8, 6)),
    "apply": lambda weight: weight.detach().apply_(lambda entry: 0.0),
    "dlpack": lambda weight: torch.utils.dlpack.to_dlpack(weight.detach()),
}


@pytest.mark.parametrize("write", BELOW.values(), ids=BELOW)
def test_weight_given_to_code_below_the_dispatcher_raises(layer, write):
    with pytest.raises(RuntimeError, match="Cannot"):
        write(layer.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_state_dict_of_the_dense_model_loaded_into_a_replaced_layer_raises(strict):
    dense = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    model = factorize(dense, 0.5)
    with pytest.raises(RuntimeError, match=r"1\.weight is a dense layer's.*into sharding\.merge\(model\)"):
        model.load_state_dict(dense.state_dict(), strict=strict)
    model.load_state_dict(model.state_dict(), strict=strict)


@pytest.mark.parametrize("entries", [lambda layer: layer._parameters, vars], ids=["parameters", "vars"])
def test_weight_put_past_the_module_raises_at_the_next_merge(entries):
    dense = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    model = factorize(dense, 0.5)
    entries(model[1])["weight"] = nn.Parameter(torch.zeros(6, 6))
    with pytest.raises(UserError, match="a write would be lost"):
        merge(model)


def test_entry_of_a_weight_is_formatted_like_a_number(layer):
    assert f"{layer.weight.detach()[0, 1]:.3f}" == f"{layer.matrix()[0, 1].item():.3f}"


def test_weight_copied_or_pickled_is_an_ordinary_tensor(layer):
    expected, file = layer.matrix().detach(), io.BytesIO()
    torch.save(layer.weight.data, file)
    file.seek(0)
    copies = [copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer.weight)), torch.load(file)]
    copies += [layer.weight.detach().clone(), torch.tensor(layer.weight.tolist())]
    for made in copies:
        assert type(made) is torch.Tensor
        assert torch.equal(made, expected)
    assert (layer.weight.detach().numpy() == expected.numpy()).all()
    assert not layer.weight.detach().numpy().flags.writeable
