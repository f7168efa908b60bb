"""Gradients come back in the layout in which the images went in, with the same values."""

import pytest
import torch
from torch import nn

from sharding import FactorizedConv
from tests.train.engines.jobs import make_job, make_plan
from train.engines.memory_format import ENDS, channels_last, keep_memory_format
from train.engines.sequential import SequentialEngine

HEADS = {
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 8, 3)),
    "pooled": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
}


def gradients(kept, head, inputs):
    """Return a network's gradients, and whether the gradient of its hidden image has channels innermost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(inputs.shape[1], 8, 3, padding=1), nn.ReLU(), *HEADS[head]())
    if kept:
        assert keep_memory_format(model) is model
    seen = []

    def watch(module, images):
        images[0].register_hook(lambda gradient: seen.append(gradient.is_contiguous(memory_format=torch.channels_last)))

    model[2].register_forward_pre_hook(watch)
    model(channels_last(inputs)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()], seen[0]


@pytest.mark.parametrize("head", HEADS)
def test_gradients_of_channels_last_images_keep_layout_and_values(head):
    inputs = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    plain, innermost = gradients(False, head, inputs)
    assert not innermost
    ours, innermost = gradients(True, head, inputs)
    assert innermost
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_images_of_one_channel_stay_contiguous(head):
    inputs = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    plain, _ = gradients(False, head, inputs)
    ours, innermost = gradients(True, head, inputs)
    assert not innermost
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


def test_channels_last_of_other_inputs_is_identity():
    for shape in ((4, 3), (4, 3, 5)):
        inputs = torch.randn(shape)
        assert channels_last(inputs) is inputs


def test_channels_last_applies_only_on_cpu():
    assert not channels_last(torch.empty(2, 3, 4, 4)).is_contiguous()
    elsewhere = torch.empty(2, 3, 4, 4, device="meta")
    assert channels_last(elsewhere) is elsewhere


@pytest.mark.parametrize("strategy", ["dense", "unbiased"])
def test_resident_client_models_keep_the_layout(strategy):
    job = make_job()
    resident = SequentialEngine(job).resident(make_plan(job, strategy).shard(0))
    ends = [module for module in resident.modules() if isinstance(module, ENDS)]
    assert ends
    assert all(len(module._forward_pre_hooks) == 1 for module in ends)


@pytest.mark.parametrize("make", [nn.Conv2d, FactorizedConv], ids=["dense", "factorized"])
@pytest.mark.parametrize("channels", [3, 4, 8, 12, 16])
def test_strided_pointwise_convolution_has_correct_gradients(make, channels):
    """It would crash, hang, or be wrong with channels innermost (oneDNN#6035)."""
    torch.manual_seed(0)
    dense = nn.Conv2d(channels, 8, 1, stride=2, bias=False)
    layer = dense if make is nn.Conv2d else FactorizedConv.from_dense(dense, 3)
    model = keep_memory_format(nn.Sequential(layer))
    images, ways = torch.randn(32, channels, 16, 16), []
    for _ in range(20):
        model.zero_grad()
        model(channels_last(images)).square().sum().backward()
        ways.append([parameter.grad.clone() for parameter in model.parameters()])
    weight = (layer.weight if make is nn.Conv2d else layer.u @ layer.v.mT).flatten(1)
    expected = torch.einsum("oi,bihw->bohw", weight, images[:, :, ::2, ::2]).square().sum()
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    for gradients in ways:
        torch.testing.assert_close(gradients, list(theirs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", [nn.Flatten, lambda: nn.Conv2d(4, 8, 1, stride=2), lambda: nn.GroupNorm(2, 4)])
def test_layer_called_by_keyword_keeps_its_values(make):
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make()

        def forward(self, images):
            return self.layer(input=images)

    model, images = ByKeyword(), torch.randn(2, 4, 6, 6, requires_grad=True)
    plain = model(images)
    torch.testing.assert_close(keep_memory_format(model)(channels_last(images)), plain)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_group_norm_keeps_channels_last_and_values(groups):
    norm = nn.GroupNorm(groups, 16)
    images = torch.randn(2, 16, 5, 5, requires_grad=True)
    weights = torch.randn(2, 16, 5, 5)
    plain = norm(images)
    wanted = torch.autograd.grad((plain * weights).sum(), images)[0]
    turned = keep_memory_format(nn.Sequential(norm))(channels_last(images))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(turned, plain)
    torch.testing.assert_close(torch.autograd.grad((turned * weights).sum(), images)[0], wanted)
