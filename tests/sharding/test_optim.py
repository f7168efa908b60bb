"""Clipping and decay against their definitions."""

import pickle
from copy import deepcopy
from inspect import signature
from itertools import pairwise
from math import exp

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from sharding import FactorizedConv, FactorizedLinear, UserError, clip_and_decay
from sharding.layers.conv import lay_out_filters
from sharding.rounds import optim
from sharding.rounds.optim import can_be_fused, decay_gradients

OMEGA = torch.tensor([1.0, 10.0, 40.0])


def layers():
    torch.manual_seed(0)
    dense = (FactorizedLinear, nn.Linear(5, 4), 3), (FactorizedConv, nn.Conv2d(2, 4, 3), 2)
    made = [kind.from_dense(layer, num_terms).double() for kind, layer, num_terms in dense]
    made[0].multipliers.copy_(OMEGA)
    made[1].multipliers.copy_(torch.tensor([100.0, 5.0]))
    return made


def hooked(model, optimizer=None, *arguments, **options):
    """An optimizer of a model, SGD unless it is given, with the hook of these arguments."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(clip_and_decay(model, *arguments, **options))
    return optimizer


@pytest.mark.parametrize("groups", [1, 2])
def test_decay_gradients_of_any_layer_equal_autograd_of_the_norm(groups):
    torch.manual_seed(0)
    conv = FactorizedConv.from_dense(nn.Conv2d(4, 6, 3, groups=groups), 3).double()
    conv.multipliers.copy_(OMEGA)
    for layer in (layers()[0], conv):
        expected = torch.autograd.grad(layer.matrix().square().sum(), (layer.u, layer.v))
        for (_, gradient), wanted in zip(decay_gradients([[layer]], layer.multipliers[None]), expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_decay_gradients_of_layers_together_equal_those_of_each_alone(groups):
    torch.manual_seed(0)
    shapes = (4, 6), (4, 6), (8, 6), (4, 10)
    made = [FactorizedConv.from_dense(nn.Conv2d(i, o, 1, groups=groups), 2).double() for i, o in shapes]
    omega = torch.tensor([[1.0, 3.0], [2.0, 50.0], [1.0, 1.0], [4.0, 1e4]], dtype=torch.float64)
    step = 1e-3 * torch.rand(4, 2, dtype=torch.float64)
    together = decay_gradients([made[:2], made[2:3], made[3:]], omega, step)
    alone = [decay_gradients([[layer]], omega[i : i + 1], step[i : i + 1]) for i, layer in enumerate(made)]
    gradients = dict(pair for pairs in alone for pair in pairs)
    assert [part for part, _ in together] == [
        part for batch in (made[:2], made[2:3], made[3:]) for side in "uv" for part in [getattr(x, side) for x in batch]
    ]
    for part, gradient in together:
        torch.testing.assert_close(gradient, gradients[part], rtol=1e-12, atol=1e-12)


def decayed(of, clip=None, steps=200, omega=3000.0):
    """‖u'‖, ‖v'‖ and ω of a layer of one rare and one common term after steps of the decay alone."""
    layer = FactorizedLinear.from_dense(nn.Linear(2, 2, bias=False), 2).double()
    with torch.no_grad():
        layer.u.copy_(torch.eye(2))
        layer.v.copy_(torch.eye(2))
        layer.multipliers.copy_(torch.tensor([omega, 1.0]))
    optimizer = hooked(layer, SGD(layer.parameters(), lr=0.1, momentum=0.9), clip, 1e-4, of)
    for _ in range(steps):
        layer.u.grad, layer.v.grad = torch.zeros_like(layer.u), torch.zeros_like(layer.v)
        optimizer.step()
    return layer.u.detach().norm(dim=0), layer.v.detach().norm(dim=0)


def test_bounded_decay_of_a_rare_term_shrinks_it_where_effective_diverges():
    literal, bounded = decayed("effective"), decayed("bounded")
    assert not literal[0].isfinite().all()
    for norms in bounded:
        assert norms[0] < 0.1
        assert norms[1] == pytest.approx(exp(-200 * 2e-4 * 0.1 / (1 - 0.9)), rel=0.01)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_bounded_decay_equals_effective_decay_where_that_is_stable(clip):
    for bounded, literal in zip(
        decayed("bounded", clip, omega=100.0), decayed("effective", clip, omega=100.0), strict=True
    ):
        assert torch.equal(bounded, literal)


def test_bounded_decay_step_is_at_most_the_vector():
    layer = layers()[0]
    with torch.no_grad():
        layer.multipliers.copy_(torch.tensor([1.0, 1e3, 1e9]))
    step, factors = 0.1 * 1e-2, torch.tensor([1.0, 0.5, 1e-3], dtype=torch.float64)
    squares = torch.maximum(layer.u.square().sum(0), layer.v.square().sum(0))
    omega = torch.minimum(layer.multipliers, (2 * step * factors * squares).rsqrt())
    share = 2 * step * factors * omega**2 * squares
    assert share[0] < 1
    torch.testing.assert_close(share[1:], torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=0)
    bounded = decay_gradients([[layer]], layer.multipliers[None], (step * factors)[None])
    lowered = decay_gradients([[layer]], omega[None])
    torch.testing.assert_close(bounded, lowered, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("clip", "factors"), [(10.0, ([1.0, 1.0, 0.25], [0.1, 1.0])), (None, ([1.0] * 3, [1.0] * 2))])
def test_clip_and_decay_multiplies_gradients_by_the_clipping_factor(clip, factors):
    made = layers()
    model = nn.ModuleList(made)
    optimizer = hooked(model, SGD(model.parameters(), lr=0.0), clip, decay=0.0)
    for layer in made:
        layer.matrix().sum().backward()
    before = [(layer.u.grad.clone(), layer.v.grad.clone()) for layer in made]
    optimizer.step()
    for layer, (u, v), factor in zip(made, before, factors, strict=True):
        torch.testing.assert_close(layer.u.grad, u * torch.tensor(factor))
        torch.testing.assert_close(layer.v.grad, v * torch.tensor(factor))


def test_decay_gradients_under_autocast_are_equal():
    layer = layers()[0].float()
    expected = decay_gradients([[layer]], layer.multipliers[None])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decay_gradients([[layer]], layer.multipliers[None])[0][1], expected[0][1])


def test_sgd_of_a_strided_parameter_leaves_its_gaps_unchanged():
    storage, model = torch.zeros(6, 8), nn.Module()
    model.weight = nn.Parameter(storage[:, :4])
    optimizer = SGD(model.parameters(), lr=1.0, fused=can_be_fused(model))
    model.weight.sum().backward()
    optimizer.step()
    assert torch.equal(storage, -(torch.arange(8) < 4).float().expand(6, 8))


def test_clip_and_decay_with_sparse_gradients_trains_the_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    optimizer = hooked(model, SGD(model.parameters(), lr=1.0, fused=can_be_fused(model)))
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    assert (model[0].weight != before).any(1).tolist() == [False, True, False, True, False]


OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.001, momentum=0.5),
    "fused sgd": lambda parameters: SGD(parameters, lr=0.001, momentum=0.5, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.001),
    **({"muon": lambda parameters: torch.optim.Muon(parameters, lr=0.001)} if hasattr(torch.optim, "Muon") else {}),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 4.0])
def test_clip_and_decay_with_any_optimizer_equals_autograd_and_clipped_steps(make, clip):
    torch.manual_seed(0)
    layer, twin = (FactorizedLinear.from_dense(nn.Linear(5, 4, bias=False), 2).double() for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    for each in (layer, twin):
        each.multipliers.copy_(torch.tensor([2.0, 16.0]))
    factor = torch.tensor([1.0, 1.0 if clip is None else 0.25])
    optimizer, reference = hooked(layer, make(layer.parameters()), clip, 0.01, "effective"), make(twin.parameters())
    for x in torch.randn(3, 6, 5, dtype=torch.float64):
        optimizer.zero_grad()
        for half in x.split(3):  # gradients are accumulated; the decay counts once a step
            layer(half).square().sum().backward()
        optimizer.step()
        reference.zero_grad()
        (twin(x).square().sum() + 0.01 * twin.matrix().square().sum()).backward()
        before = twin.u.detach().clone(), twin.v.detach().clone()
        reference.step()
        with torch.no_grad():
            for part, old in zip((twin.u, twin.v), before, strict=True):
                part.copy_(old + factor * (part - old))
    torch.testing.assert_close(layer.state_dict(), twin.state_dict(), rtol=1e-10, atol=1e-12)


MAXIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and {"maximize", "weight_decay"} <= signature(kind).parameters.keys()
]


@pytest.mark.parametrize("kind", MAXIMIZERS)
@pytest.mark.parametrize("maximize", [False, True])
def test_decay_goes_the_way_of_torchs_weight_decay(kind, maximize):
    layer = FactorizedLinear.from_dense(nn.Linear(5, 4, bias=False), 1)  # of one term: both decays shrink u and v
    twin = deepcopy(layer)
    optimizer = hooked(layer, kind(layer.parameters(), maximize=maximize), decay=0.1)
    reference = kind(twin.parameters(), maximize=maximize, weight_decay=0.1)
    for each, steps in ((layer, optimizer), (twin, reference)):
        before = each.u.norm()
        each(torch.ones(1, 5)).mul(0).sum().backward()
        steps.step()
        assert each.u.norm() < before


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_clip_and_decay_with_a_closure_equals_that_without(make):
    states = []
    for form in ("plain", "positional", "keyword"):
        torch.manual_seed(0)
        layer = FactorizedLinear.from_dense(nn.Linear(5, 4, bias=False), 2)
        layer.multipliers.copy_(torch.tensor([2.0, 16.0]))
        optimizer = hooked(layer, make(layer.parameters()), 4.0, 0.01)

        def closure(layer=layer, optimizer=optimizer):
            optimizer.zero_grad()
            loss = layer(torch.ones(3, 5)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            if form == "plain":
                closure()
                optimizer.step()
            else:
                loss = optimizer.step(closure) if form == "positional" else optimizer.step(closure=closure)
                assert loss > 0
        states.append(layer.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    torch.testing.assert_close(states[2], states[0], rtol=0, atol=0)


def test_clip_and_decay_refuses_an_optimizer_that_needs_a_closure():
    layer = layers()[0]
    optimizer = hooked(layer, torch.optim.LBFGS(layer.parameters()))
    with pytest.raises(UserError, match="LBFGS needs a closure"):
        optimizer.step(lambda: layer(torch.ones(1, 5).double()).sum())


def test_clip_of_steps_reads_the_multipliers_of_a_shard_that_is_loaded_later():
    layer = layers()[0]
    optimizer = hooked(layer, torch.optim.Adam(layer.parameters(), lr=0.1), 10.0, decay=0)
    for multipliers, factors in (([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]), ([1.0, 20.0, 100.0], [1.0, 0.5, 0.1])):
        layer.multipliers.copy_(torch.tensor(multipliers))
        before = layer.u.detach().clone()
        layer.u.grad, layer.v.grad = torch.ones_like(layer.u), torch.ones_like(layer.v)
        optimizer.step()  # Adam's step is the rate where all gradients so far are equal
        wanted = (-0.1 * torch.tensor(factors)).double().expand(4, 3)
        torch.testing.assert_close(layer.u.detach() - before, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_clip_and_decay_with_gradient_scaling_equals_that_without(fused):
    torch.manual_seed(0)
    layer, twin = (FactorizedLinear.from_dense(nn.Linear(5, 4), 2) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(6, 5)
    optimizer, plain = (hooked(each, SGD(each.parameters(), lr=0.1, fused=fused), decay=0.5) for each in (layer, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(layer(x).square().sum()).backward()
    scaler.step(optimizer)
    twin(x).square().sum().backward()
    plain.step()
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())


def test_clip_and_decay_computes_nothing_for_a_layer_without_gradients(monkeypatch):
    model, decayed = nn.ModuleList(layers()), []
    monkeypatch.setattr(optim, "decay_gradients", lambda batches, omega, step: decayed.extend(batches) or [])
    optimizer = hooked(model)
    model[0].requires_grad_(False)  # as a shard that is loaded later does
    for part in model[1].parameters():
        part.grad = torch.zeros_like(part)
    optimizer.step()
    assert decayed == [[model[1]]]


def test_hooks_of_two_optimizers_equal_the_hook_of_one():
    gradients = []
    for split in (False, True):
        model = nn.Sequential(layers()[0])
        factors, bias = [model[0].u, model[0].v], [model[0].bias]
        optimizers = [hooked(model, SGD(parts, lr=0.1)) for parts in ((bias, factors) if split else (factors + bias,))]
        model(torch.ones(1, 5).double()).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        gradients.append([part.grad for part in factors + bias])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_clip_and_decay_with_frozen_and_complex_parameters_skips_them():
    model = torch.nn.Sequential(*layers()[:1])
    model.register_parameter("phase", torch.nn.Parameter(torch.ones(2, dtype=torch.cdouble)))
    model[0].u.requires_grad_(False)
    before, phase = model[0].u.clone(), model.phase.detach().clone()
    optimizer = hooked(model, SGD(model.parameters(), lr=0.1, fused=can_be_fused(model)))
    (model(torch.ones(1, 5).double()).sum() + model.phase.abs().sum()).backward()
    optimizer.step()
    assert torch.equal(model[0].u, before)
    assert not torch.equal(model.phase, phase)


class Counter(TorchDispatchMode):
    """Count the operations for which a test is true.

    Attributes:
        count: their number so far.
    """

    def __init__(self, counts):
        super().__init__()
        self.counts, self.count = counts, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.counts(func)
        return func(*args, **(kwargs or {}))


def test_operations_of_the_hook_do_not_grow_with_layers_of_one_shape():
    counts = []
    for number in (2, 8):
        model = nn.Sequential(*(FactorizedLinear.from_dense(nn.Linear(4, 4, bias=False), 2) for _ in range(number)))
        optimizer = hooked(model, SGD(model.parameters(), lr=0.1, fused=True), decay=0.01)
        model(torch.ones(1, 4)).sum().backward()
        with Counter(lambda func: not func.is_view) as counter:
            optimizer.step()
        counts.append(counter.count)
    assert counts[0] == counts[1] <= 31


@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("channels", "groups"), [((3, 8, 8, 8), 1), ((4, 8, 8, 8), 2)])
def test_steps_with_filters_laid_out_equal_those_without_and_copy_nothing(channels, groups, fused, clip):
    """Two layers of one shape, whose decay is computed together, and one of another."""
    torch.manual_seed(0)
    dense = [nn.Conv2d(i, o, 3, padding=1, groups=groups) for i, o in pairwise(channels)]
    plain = nn.Sequential(*(FactorizedConv.from_dense(layer, 3) for layer in dense)).double()
    for layer in plain:
        layer.multipliers.copy_(torch.tensor([1.0, 2.0, 3.0]))
    turned, x = lay_out_filters(deepcopy(plain)), torch.randn(2, channels[0], 5, 5, dtype=torch.float64)
    for model in (plain, turned):
        optimizer = hooked(model, SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused), clip, decay=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            with Counter(lambda func: func.name() in ("aten::clone", "aten::copy_")) as copies:
                model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(turned.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    if groups == 1:
        assert copies.count == 0
        assert all(layer.v.grad.stride() == layer.v.stride() == (1, len(layer.v)) for layer in turned)
    copy = pickle.loads(pickle.dumps(turned))
    copy.load_state_dict(plain.state_dict())
    assert [part.stride() for part in copy.parameters()] == [part.stride() for part in turned.parameters()]
    torch.testing.assert_close(copy(x), plain(x), rtol=0, atol=1e-12)


def test_step_after_one_that_raised_is_scaled_from_where_it_began():
    class RaisesOnce(torch.optim.Adam):
        raised = False

        def step(self, closure=None):
            if not self.raised:
                self.raised = True
                raise RuntimeError("no step")
            return super().step(closure)

    changes = []
    for kind in (RaisesOnce, torch.optim.Adam):
        linear = layers()[0]
        optimizer = hooked(linear, kind(linear.parameters(), lr=0.01), 10.0, 0.0)
        (linear.u.sum() + linear.v.sum()).backward()
        if kind is RaisesOnce:
            with pytest.raises(RuntimeError, match="no step"):
                optimizer.step()
        with torch.no_grad():
            linear.u += 1.0
        before = linear.u.detach().clone()
        optimizer.step()
        changes.append(linear.u.detach() - before)
    torch.testing.assert_close(*changes, rtol=0, atol=1e-12)
