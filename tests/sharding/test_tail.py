"""A weak client's tail: the terms that only stronger clients of the round train, held frozen."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sharding import (
    Server,
    Shard,
    ShardPlanner,
    Update,
    UserError,
    client_model,
    factorize,
    init_empty,
    merge,
    save_factorized,
    train_shard,
)
from sharding.layers.tail import stacked_terms
from sharding.matrices.quantization import quantize_terms
from sharding.matrices.spectrum import Spectrum
from sharding.rounds.aggregation.faults import find_misfit
from tests.sharding.test_kinds import Conv1D

RATIOS = {"weak": 0.2, "middle": 0.3, "strong": 0.5}


RNG = torch.Generator().manual_seed(0)  # these are drawn before any test seeds torch
IMAGES = torch.randn(2, 12, 9, 9, generator=RNG)
LAYERS = {
    "linear": (lambda: nn.Linear(12, 20), torch.randn(3, 12, generator=RNG)),
    "transposed linear": (lambda: Conv1D(20, 12), torch.randn(3, 12, generator=RNG)),
    "convolution": (lambda: nn.Conv2d(12, 20, 3, stride=2, padding=1, dilation=2), IMAGES),
    "same padding": (lambda: nn.Conv2d(12, 20, 3, padding="same"), IMAGES),
    "reflected padding": (lambda: nn.Conv2d(12, 20, (3, 1), padding=1, padding_mode="reflect"), IMAGES),
    "groups": (lambda: nn.Conv2d(12, 20, 3, groups=2), IMAGES),
    "one image": (lambda: nn.Conv1d(12, 20, 3), torch.randn(12, 7, generator=RNG)),
    "transposed": (lambda: nn.ConvTranspose2d(12, 20, 3, stride=2, output_padding=1), IMAGES),
    "transposed groups": (lambda: nn.ConvTranspose2d(12, 20, 3, groups=2), IMAGES),
    "embedding": (lambda: nn.Embedding(30, 20), torch.randint(30, (2, 5), generator=RNG)),
}


def planned(model, tail_format="float32", ratios=RATIOS):
    return ShardPlanner("top_n", skip=(), also=("*",), tail_format=tail_format).plan(model, ratios)


def moved_by(change):
    """Training that adds this to all values."""

    def train(client, shard):
        return shard.returned({name: part + change for name, part in shard.trained().items()})

    return train


def trained(model, x):
    """Return a model's output, and the gradients of its factors and of its inputs."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = model(x)
    y.square().sum().backward()
    return y, x.grad, {name: part.grad for name, part in model.named_parameters()}


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_with_its_tail_computes_what_the_strongest_does(kind):
    make, x = LAYERS[kind]
    model = nn.Sequential(make())
    plan = planned(model)
    whole, x_grad, grads = trained(client_model(model, plan.shard("strong")), x)
    assert not plan.shard("strong").tail
    for client in ("weak", "middle"):
        small = client_model(model, plan.shard(client))
        y, other_x_grad, other_grads = trained(small, x)
        torch.testing.assert_close(y, whole)
        if x_grad is not None:
            torch.testing.assert_close(other_x_grad, x_grad)
        n = small[0].num_terms
        for side in ("0.u", "0.v"):
            torch.testing.assert_close(other_grads[side], grads[side][:, :n])
        strongest = client_model(model, plan.shard("strong"))
        torch.testing.assert_close(small[0].weight + 0, strongest[0].weight + 0)
        torch.testing.assert_close(merge(small)(x), whole)


@pytest.mark.parametrize("tail", ["int4", "int8", "bfloat16", "float32"])
def test_tail_travels_with_the_shard_and_its_bytes_are_counted(tail):
    model = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Conv1d(50, 40, 1))
    planner = ShardPlanner("top_n", skip=(), tail_format=tail)
    plan = planner.plan(model, RATIOS)
    shard = plan.shard("weak")
    data = shard.to_bytes()
    assert len(data) == shard.nbytes == plan.template("weak").nbytes == planner.nbytes(model, 0.2, 0.5)
    assert shard.nbytes > planner.nbytes(model, 0.2)
    returned = Shard.from_bytes(data)
    assert all(torch.equal(stored, returned.tail[name]) for name, stored in shard.tail.items())
    assert returned.tail.keys() == {"0", "2"}


def test_tail_in_four_bits_takes_an_eighth_of_exact_terms_and_is_near_them():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    exact, rounded, none = (planned(model, tail, {"weak": 0.25, "strong": 0.5}) for tail in ("float32", "int4", None))
    sizes = [sum(part.nbytes for part in plan.shard("weak").tail.values()) for plan in (exact, rounded, none)]
    assert sizes == [2 * 16 * 64 * 4, 2 * 16 * 2 * 18, 0]
    x = torch.randn(8, 64)
    want, near, without = (client_model(model, plan.shard("weak"))(x) for plan in (exact, rounded, none))
    assert 0 < (near - want).norm() < 0.3 * (without - want).norm()


@pytest.mark.parametrize(
    ("strategy", "ratios"),
    [*((name, RATIOS) for name in ("collective", "unbiased", "prism", "top_n_scaled")), ("top_n", {1: 0.2, 2: 0.2})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_strategy_that_draws_terms_or_clients_of_one_keep_ratio_have_no_tail(strategy, ratios):
    plan = ShardPlanner(strategy, skip=(), tail_format="int4").plan(nn.Sequential(nn.Linear(40, 40)), ratios)
    assert not any(shard.tail for _, shard in plan.shards())


@pytest.mark.parametrize("tail", ["int4", "float32"])
def test_tails_of_all_keep_ratios_are_parts_of_the_longest(tail):
    plan = planned(nn.Sequential(nn.Linear(40, 50)), tail, {str(ratio): ratio for ratio in (0.1, 0.4, 0.7, 1.0)})
    tails = {ratio: plan.shard(ratio).tail["0"] for ratio in ("0.1", "0.4", "0.7")}
    assert len({stored.untyped_storage().data_ptr() for stored in tails.values()}) == 1
    plan = planned(nn.Sequential(nn.Conv2d(8, 6, 3, groups=2), nn.Linear(9, 7)), tail)
    for client in ("weak", "middle"):
        for name, spectrum in plan.spectra.items():
            frozen = spectrum.indices[len(plan.shard(client).terms[name].indices) :]
            u, v = (stacked_terms(side, spectrum.blocks) for side in spectrum.cut(frozen))
            assert torch.equal(plan.shard(client).tail[name], quantize_terms(u, v, tail))


def test_clients_train_on_top_of_the_tail_and_return_their_terms_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))
    plan = ShardPlanner("top_n").plan(model, RATIOS)  # in four bits by default
    with init_empty():
        structure = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))
    shard = plan.shard("weak")
    batches = [(torch.randn(8, 20), torch.randint(4, (8,)))]
    update = train_shard(structure, shard, batches, lr=0.1)
    assert shard.tail
    assert find_misfit(shard, update) is None
    with pytest.raises(UserError, match="fixed tensors were returned: 2"):
        Update.from_bytes(shard.to_bytes())
    server = Server(model, ShardPlanner("top_n"))
    result = server.round(0, RATIOS, lambda _, shard: train_shard(structure, shard, batches, lr=0.1))
    assert result.accepted == [*RATIOS]


@pytest.mark.parametrize("options", [{}, {"max_share": 0.9}], ids=["at once", "kept"])
@pytest.mark.parametrize("compression", ["float32", "int8"])
def test_client_counts_in_the_average_of_its_tail_with_the_servers_vectors(options, compression):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40, bias=False))
    planner = ShardPlanner("top_n", skip=(), compression=compression)
    plan = planner.plan(model, {"weak": 0.25, "strong": 0.5})
    server, weights = Server(model, planner, **options), {"weak": 3.0, "strong": 1.0}
    average, updates, before = server.average(plan, weights), {}, model[0].weight.detach().clone()
    for client, shard in plan.shards():
        new = {name: part + torch.randn_like(part) for name, part in shard.trained().items()}
        updates[client] = shard.returned(new)
        average.add(client, updates[client])
    server.step(average)
    u, v = plan.spectra["0"].u, plan.spectra["0"].v
    (weak_u, weak_v), (strong_u, strong_v) = (
        (values.terms["0"].u, values.terms["0"].v) for values in (plan.values_of(updates[each]) for each in weights)
    )
    weak_u, weak_v = torch.cat([weak_u, u[:, 5:]], dim=1), torch.cat([weak_v, v[:, 5:]], dim=1)
    mean_u, mean_v = 0.75 * weak_u + 0.25 * strong_u, 0.75 * weak_v + 0.25 * strong_v
    expected = before + mean_u @ mean_v.mT - u @ v.mT
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=1e-4, atol=1e-4)


def test_average_does_not_copy_the_tail_of_a_weak_client(monkeypatch):
    model = nn.Sequential(nn.Linear(20, 40, bias=False))
    server = Server(model, ShardPlanner("top_n", skip=()))
    plan = server.plan({"weak": 0.25, "strong": 0.5}, 0)
    shards, average = dict(plan.shards()), server.average_as_reported(plan)
    monkeypatch.setattr(Spectrum, "cut", None)
    for client, shard in shards.items():
        average.add(client, shard.returned(shard.trained()), 1.0)
    assert server.step(average).accepted == ["weak", "strong"]


def test_plan_without_clients_has_no_tails():
    plan = planned(nn.Sequential(nn.Linear(20, 40)), ratios={})
    assert (len(plan), plan.tails) == (0, {})


def test_round_with_a_frozen_layer_and_uneven_clients_leaves_it_as_it_is():
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 20))
    model[2].weight.requires_grad_(False)
    frozen = model[2].weight.clone()
    server = Server(model, ShardPlanner("top_n", skip=()))
    assert server.round(0, {"weak": 0.25, "strong": 0.5}, moved_by(1.0)).accepted == ["weak", "strong"]
    assert torch.equal(model[2].weight, frozen)


def test_tail_stays_as_it_is_if_no_client_that_trains_it_answers():
    model = nn.Sequential(nn.Linear(20, 40, bias=False))
    server = Server(model, ShardPlanner("top_n", skip=()))
    before = model[0].weight.detach().clone()
    answers = {"weak": moved_by(0.0), "strong": lambda client, shard: None}
    outcome = server.round(0, {"weak": 0.25, "strong": 0.5}, lambda client, shard: answers[client](client, shard))
    assert outcome.accepted == ["weak"]
    torch.testing.assert_close(model[0].weight.detach(), before, rtol=0, atol=1e-6)


def test_loaded_shard_replaces_the_tail_or_removes_it():
    model = nn.Sequential(nn.Linear(40, 40))
    with_tail, without = planned(model).shard("weak"), planned(model, None).shard("weak")
    small, x = client_model(model, with_tail), torch.randn(2, 40)
    first = small(x)
    without.load_into(small)
    assert small[0].tail is None
    with_tail.load_into(small)
    assert torch.equal(small(x), first)


@pytest.mark.parametrize("kind", LAYERS)
def test_symbolic_trace_of_a_layer_with_residual_and_tail_is_equal(kind):
    make, x = LAYERS[kind]
    model = factorize(nn.Sequential(make()), 0.5, skip=(), also=("*",), residual_format="int4")
    small = client_model(model, planned(model, "int4").shard("weak"), frozen=ShardPlanner().frozen(model))
    assert [part.by_terms for part in small[0].frozen] == [False, True]
    torch.testing.assert_close(torch.fx.symbolic_trace(small)(x), small(x))


def test_wrapped_structure_gets_its_tail():
    model, x = nn.Sequential(nn.Linear(40, 40)), torch.randn(2, 40)
    shard = planned(model).shard("weak")
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(40, 40)))
    torch.testing.assert_close(client_model(wrapped, shard)(x), client_model(model, shard)(x))


def test_terms_of_a_factorized_server_have_a_tail_beside_its_residual():
    model = factorize(nn.Sequential(nn.Linear(40, 40)), 0.5, skip=(), residual_format="int8")
    server = Server(model, ShardPlanner("top_n", tail_format="float32"))
    plan, x = server.plan({"weak": 0.1, "strong": 0.5}, 0), torch.randn(2, 40)
    structure = nn.Sequential(nn.Linear(40, 40))
    small = client_model(structure, plan.shard("weak"), frozen=server.frozen)
    torch.testing.assert_close(small(x), model(x))


def test_unusable_tails_are_refused_in_one_line(tmp_path):
    model = nn.Sequential(nn.Linear(40, 40))
    plan = planned(model)
    shard = plan.shard("weak")
    with pytest.raises(UserError, match="tail_format is 'int3'; it is one of int4"):
        ShardPlanner("top_n", tail_format="int3")
    with pytest.raises(UserError, match="a tail of '0' without terms"):
        Shard.from_bytes(replace(shard, terms={}).to_bytes())
    for stored in (shard.tail["0"][:, 1:], shard.tail["0"].int(), shard.tail["0"][None, None]):
        with pytest.raises(UserError, match="the tail of 0 does not fit this FactorizedLinear"):
            client_model(model, replace(shard, tail={"0": stored}))
    with pytest.raises(UserError, match="0 has a tail, which belongs to one round"):
        save_factorized(client_model(model, shard), tmp_path / "saved")


def test_gradients_by_vmap_of_a_convolution_with_its_tail_equal_those_of_each_image():
    model = nn.Sequential(nn.Conv2d(12, 20, 3, stride=2, padding=1, groups=2))
    small = client_model(model, planned(model, "int4").shard("weak"))
    parts = dict(small.named_parameters())

    def loss(parts, x):
        return torch.func.functional_call(small, parts, x[None]).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parts, IMAGES)
    for index, x in enumerate(IMAGES):
        for name, gradient in torch.func.grad(loss)(parts, x).items():
            torch.testing.assert_close(each[name][index], gradient)


def test_convolution_with_its_tail_trains_under_autocast():
    model = nn.Sequential(nn.Conv2d(12, 20, 3, padding=1))
    small = client_model(model, planned(model, "int4").shard("weak"))
    want, x_grad, grads = trained(small, IMAGES)
    small.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, other_x_grad, other_grads = trained(small, IMAGES)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, rtol=0.05, atol=0.05)
    torch.testing.assert_close(other_x_grad, x_grad, rtol=0.1, atol=0.2)
    for name, gradient in grads.items():
        assert (other_grads[name] - gradient).norm() < 0.05 * gradient.norm()


def test_strong_clients_terms_train_from_a_start_of_the_weakest_rank():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 40, bias=False), nn.Conv2d(1, 1, 1))
    model = merge(factorize(dense, 0.2, skip=("1",)))
    server = Server(model, ShardPlanner("top_n", skip=("1",)))
    plan = server.plan({"weak": 0.2, "strong": 0.5}, 0)
    terms = plan.shard("strong").terms["0"]
    assert terms.u.shape[1] == 20
    torch.testing.assert_close(terms.u[:, 8:].norm(dim=0), torch.ones(12))  # not rounding errors of the start
    assert not terms.v[:, 8:].any()

    def train(client, shard):
        part = {name: values + 0.1 * torch.randn_like(values) for name, values in shard.trained().items()}
        return shard.returned(part)

    server.round(0, {"weak": 0.2, "strong": 0.5}, train)
    assert torch.linalg.matrix_rank(model[0].weight, rtol=1e-4) == 20
