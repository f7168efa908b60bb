"""Clipping and decay against their definitions."""

import pytest
import torch

from sharding import FactorizedConv2d, FactorizedLinear, UserError
from sharding.optim import clip_effective_lr, clip_factors, factorized_layers, frobenius_decay


def layers():
    torch.manual_seed(0)
    made = [FactorizedLinear(5, 4, 3).double(), FactorizedConv2d(2, 4, 3, 2).double()]
    made[0].multipliers.copy_(torch.tensor([1.0, 10.0, 40.0]))
    made[1].multipliers.copy_(torch.tensor([100.0, 5.0]))
    return made


def test_frobenius_decay_is_the_norm_of_the_composed_matrices():
    made = layers()
    expected = sum(torch.linalg.matrix_norm(layer.to_dense().weight.flatten(1)) ** 2 for layer in made)
    torch.testing.assert_close(frobenius_decay(made), expected, rtol=1e-12, atol=0)


def test_frobenius_decay_has_the_gradient_of_the_norm():
    layer = layers()[0]
    frobenius_decay([layer]).backward()
    u, v, omega = layer.u.detach(), layer.v.detach(), layer.multipliers
    matrix = (u * omega) @ v.mT
    torch.testing.assert_close(layer.u.grad, 2 * matrix @ v * omega, rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.v.grad, 2 * matrix.mT @ u * omega, rtol=1e-12, atol=0)


def test_gradients_are_multiplied_by_the_clipped_ratio():
    made = layers()
    for layer in made:
        layer.matrix().sum().backward()
    before = [(layer.u.grad.clone(), layer.v.grad.clone()) for layer in made]
    clip_effective_lr(made, clip_factors(made, clip=10.0))
    for layer, (u, v), factor in zip(made, before, ([1.0, 1.0, 0.25], [0.1, 1.0]), strict=True):
        torch.testing.assert_close(layer.u.grad, u * torch.tensor(factor))
        torch.testing.assert_close(layer.v.grad, v * torch.tensor(factor))


def test_an_infinite_clip_changes_nothing():
    assert all(factor.eq(1).all() for factor in clip_factors(layers(), float("inf")))


def test_layers_without_gradients_are_passed_over():
    made = layers()
    clip_effective_lr(made, clip_factors(made, 10.0))
    assert made[0].u.grad is None


@pytest.mark.parametrize("clip", [0.99, 0, -1])
def test_a_clip_below_one_is_told(clip):
    with pytest.raises(UserError, match=f"clip is {clip}"):
        clip_factors(layers(), clip)


def test_factorized_layers_are_found_in_order():
    made = layers()
    assert factorized_layers(torch.nn.Sequential(made[1], torch.nn.ReLU(), made[0])) == [made[1], made[0]]
