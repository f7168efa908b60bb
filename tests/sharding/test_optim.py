"""Clipping and decay against their definitions."""

from math import exp

import pytest
import torch
from torch import nn

from sharding import FactorizedConv, FactorizedLinear, LocalSGD
from sharding.optim import clip_effective_lr, clip_factors, decay_multipliers, factorized_layers, frobenius_decay


def layers():
    torch.manual_seed(0)
    dense = (FactorizedLinear, nn.Linear(5, 4), 3), (FactorizedConv, nn.Conv2d(2, 4, 3), 2)
    made = [kind.from_dense(layer, num_terms).double() for kind, layer, num_terms in dense]
    made[0].multipliers.copy_(torch.tensor([1.0, 10.0, 40.0]))
    made[1].multipliers.copy_(torch.tensor([100.0, 5.0]))
    return made


def test_frobenius_decay_is_the_norm_of_the_composed_matrices_or_of_those_without_omega():
    made = layers()
    ones = [torch.ones_like(layer.multipliers) for layer in made]
    composed = [layer.to_dense().weight.flatten(1) for layer in made]
    for matrices, multipliers in ((composed, None), ([layer.u @ layer.v.mT for layer in made], ones)):
        expected = sum(torch.linalg.matrix_norm(matrix) ** 2 for matrix in matrices)
        torch.testing.assert_close(frobenius_decay(made, multipliers), expected, rtol=1e-12, atol=0)


def test_frobenius_decay_has_the_gradient_of_the_norm():
    layer = layers()[0]
    frobenius_decay([layer]).backward()
    u, v, omega = layer.u.detach(), layer.v.detach(), layer.multipliers
    matrix = (u * omega) @ v.mT
    torch.testing.assert_close(layer.u.grad, 2 * matrix @ v * omega, rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.v.grad, 2 * matrix.mT @ u * omega, rtol=1e-12, atol=0)


def decayed(of, clip=None, steps=200, omega=3000.0):
    """‖u'‖, ‖v'‖ and ω of a layer of one rare and one common term after steps of the decay alone."""
    layer = FactorizedLinear.from_dense(nn.Linear(2, 2, bias=False), 2).double()
    with torch.no_grad():
        layer.u.copy_(torch.eye(2))
        layer.v.copy_(torch.eye(2))
        layer.multipliers.copy_(torch.tensor([omega, 1.0]))
    optimizer = LocalSGD(layer, lr=0.1, momentum=0.9, frobenius_decay=1e-4, clip=clip, decay_of=of)
    for _ in range(steps):
        optimizer.step(torch.zeros((), dtype=torch.float64))
    return layer.u.detach().norm(dim=0), layer.v.detach().norm(dim=0)


def test_the_literal_decay_of_a_rare_term_diverges_and_the_bounded_one_shrinks_it():
    literal, bounded = decayed("effective"), decayed("bounded")
    assert not literal[0].isfinite().all()
    for norms in bounded:
        assert norms[0] < 0.1
        assert norms[1] == pytest.approx(exp(-200 * 2e-4 * 0.1 / (1 - 0.9)), rel=0.01)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_the_bounded_decay_is_the_literal_one_to_the_last_bit_where_that_is_stable(clip):
    for bounded, literal in zip(
        decayed("bounded", clip, omega=100.0), decayed("effective", clip, omega=100.0), strict=True
    ):
        assert torch.equal(bounded, literal)


def test_no_step_of_the_bounded_decay_takes_more_than_the_whole_vector():
    layer = layers()[0]
    with torch.no_grad():
        layer.multipliers.copy_(torch.tensor([1.0, 1e3, 1e9]))
    step, factors = 0.1 * 1e-2, torch.tensor([1.0, 0.5, 1e-3], dtype=torch.float64)
    omega = decay_multipliers("bounded", layer, step * factors)
    squares = torch.maximum(layer.u.square().sum(0), layer.v.square().sum(0))
    share = 2 * step * factors * omega**2 * squares
    assert share[0] < 1
    torch.testing.assert_close(share[1:], torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(decay_multipliers("effective", layer, 1.0), layer.multipliers)


def test_gradients_are_multiplied_by_the_clipped_ratio():
    made = layers()
    for layer in made:
        layer.matrix().sum().backward()
    before = [(layer.u.grad.clone(), layer.v.grad.clone()) for layer in made]
    clip_effective_lr(made, clip_factors(made, clip=10.0))
    for layer, (u, v), factor in zip(made, before, ([1.0, 1.0, 0.25], [0.1, 1.0]), strict=True):
        torch.testing.assert_close(layer.u.grad, u * torch.tensor(factor))
        torch.testing.assert_close(layer.v.grad, v * torch.tensor(factor))
    assert all(factor.eq(1).all() for factor in clip_factors(made, float("inf")))


def test_a_model_without_factorized_layers_has_no_decay():
    assert frobenius_decay(factorized_layers(torch.nn.Linear(2, 2))) == 0
    assert frobenius_decay(iter([])) == 0


def test_decay_keeps_its_precision_under_autocast():
    made = [layer.float() for layer in layers()]
    expected = frobenius_decay(made)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(frobenius_decay(made), expected)


def test_a_parameter_with_gaps_in_its_memory_is_stepped_alone():
    whole, model = torch.zeros(6, 8), nn.Module()
    model.weight = nn.Parameter(whole[:, :4])
    LocalSGD(model, lr=1.0).step(model.weight.sum())
    assert torch.equal(whole, -(torch.arange(8) < 4).float().expand(6, 8))


def test_an_embedding_with_sparse_gradients_can_be_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    LocalSGD(model, lr=1.0).step(model(torch.tensor([1, 3])).sum())
    assert (model[0].weight != before).any(1).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("clip", [None, 4.0])
def test_a_local_step_is_decay_then_clipping_then_momentum(clip):
    torch.manual_seed(0)
    layer, twin = (FactorizedLinear.from_dense(nn.Linear(5, 4), 2).double() for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    for each in (layer, twin):
        each.multipliers.copy_(torch.tensor([2.0, 16.0]))
    factor = torch.tensor([1.0, 1.0 if clip is None else 0.25])
    optimizer, momentum = LocalSGD(layer, 0.001, 0.5, 0.01, clip, "effective"), {}
    for x in torch.randn(3, 6, 5, dtype=torch.float64):
        optimizer.step(layer(x).square().sum())
        twin.zero_grad()
        (twin(x).square().sum() + 0.01 * twin.matrix().square().sum()).backward()
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                gradient = parameter.grad * (factor if name in "uv" else 1)
                momentum[name] = 0.5 * momentum.get(name, 0) + gradient
                parameter -= 0.001 * momentum[name]
    torch.testing.assert_close(layer.state_dict(), twin.state_dict(), rtol=1e-10, atol=1e-12)


def test_a_local_step_passes_frozen_and_complex_parameters():
    model = torch.nn.Sequential(*layers()[:1])
    model.register_parameter("phase", torch.nn.Parameter(torch.ones(2, dtype=torch.cdouble)))
    model[0].u.requires_grad_(False)
    before, phase = model[0].u.clone(), model.phase.detach().clone()
    LocalSGD(model, 0.1).step(model(torch.ones(1, 5).double()).sum() + model.phase.abs().sum())
    assert torch.equal(model[0].u, before)
    assert not torch.equal(model.phase, phase)
