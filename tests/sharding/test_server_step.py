"""The server's step by torch's optimizers against their recursions, written out."""

from copy import deepcopy
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from sharding import FedYogi, Server, ShardPlanner, UserError, iterate_average
from sharding.matrices.values import find_nonfinite

OPTIMIZERS = {
    "sgd": lambda weights: SGD(weights, lr=0.5),
    "momentum": lambda weights: SGD(weights, lr=0.5, momentum=0.9),
    "nesterov": lambda weights: SGD(weights, lr=0.5, momentum=0.9, nesterov=True),
    "adam": lambda weights: Adam(weights, lr=0.5, betas=(0.9, 0.99), eps=1e-3),
    "adamw": lambda weights: AdamW(weights, lr=0.5),
    "adagrad": lambda weights: Adagrad(weights, lr=0.5),
    "adafactor": lambda weights: Adafactor(weights, lr=0.5),
    "yogi": lambda weights: FedYogi(weights, lr=0.5),
}
STATEFUL = [name for name in OPTIMIZERS if name != "sgd"]


def server_of(model, make=None, **options):
    return Server(model, ShardPlanner("dense"), make and make(model.parameters()), **options)


def move(server, change=1.0, round=0):
    """Run a round in which the only client returns all trained values plus a change."""

    def train(client, shard):
        return shard.returned({name: value + change for name, value in shard.trained().items()})

    return server.round(round, {"phone": 1.0}, train)


def model_at(value: float) -> nn.Module:
    model = nn.Linear(3, 2).double()
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return model


CHANGES = [0.5, -0.25, 0.0625, 1.0]


def average_by_hand(lr: float, beta: float) -> list[float]:
    return momentum_by_hand(lr, 0.0)


def momentum_by_hand(lr: float, beta: float) -> list[float]:
    weight, m, weights = 1.0, 0.0, []
    for change in CHANGES:
        m = beta * m + change
        weight += lr * m
        weights.append(weight)
    return weights


def nesterov_by_hand(lr: float, beta: float) -> list[float]:
    """W itself goes as with momentum; what is sent, and kept, is η_g·β·m ahead of it."""
    weight, m, weights = 1.0, 0.0, []
    for change in CHANGES:  # Δ of the point that was sent
        m = beta * m + change
        weight += lr * m
        weights.append(weight + lr * beta * m)
    return weights


def adam_by_hand(lr: float, beta: float) -> list[float]:
    weight, m, v, weights = 1.0, 0.0, 0.0, []
    for t, change in enumerate(CHANGES, start=1):
        m, v = beta * m + (1 - beta) * change, 0.99 * v + 0.01 * change**2
        weight += lr * (m / (1 - beta**t)) / ((v / (1 - 0.99**t)) ** 0.5 + 1e-3)
        weights.append(weight)
    return weights


def yogi_by_hand(lr: float, beta: float) -> list[float]:
    weight, m, v, weights = 1.0, 0.0, 1e-6, []
    for change in CHANGES:
        m = beta * m + (1 - beta) * change
        v -= 0.01 * change**2 * (1 if v > change**2 else -1 if v < change**2 else 0)
        weight += lr * m / (v**0.5 + 1e-3)
        weights.append(weight)
    return weights


RECURSIONS = [
    (lambda weights, lr, beta: SGD(weights, lr), average_by_hand),
    (lambda weights, lr, beta: SGD(weights, lr, beta), momentum_by_hand),
    (lambda weights, lr, beta: SGD(weights, lr, beta, nesterov=True), nesterov_by_hand),
    (lambda weights, lr, beta: Adam(weights, lr, (beta, 0.99), eps=1e-3), adam_by_hand),
    (lambda weights, lr, beta: FedYogi(weights, lr, (beta, 0.99), tau=1e-3), yogi_by_hand),
]


@pytest.mark.parametrize(("lr", "beta"), [(1.0, 0.5), (0.3, 0.9)])
@pytest.mark.parametrize(("make", "by_hand"), RECURSIONS, ids=["average", "momentum", "nesterov", "adam", "yogi"])
def test_step_with_an_optimizer_follows_its_recursion(make, by_hand, lr, beta):
    model, weights = model_at(1.0), []
    server = Server(model, ShardPlanner("dense"), make(model.parameters(), lr, beta))
    for t, change in enumerate(CHANGES):
        move(server, change, t)
        weights.append(float(model.weight[0, 0].detach()))
        assert len({float(x) for weight in model.parameters() for x in weight.detach().flatten()}) == 1
    assert weights == pytest.approx(by_hand(lr, beta), rel=1e-12)


@pytest.mark.parametrize("name", STATEFUL)
def test_step_of_a_round_without_updates_changes_nothing(name):
    server = server_of(model_at(1.0), OPTIMIZERS[name])
    move(server)
    weight, state = server.model.weight.clone(), {key: value.clone() for key, value in server.state_dict().items()}
    server.round(1, {"phone": 1.0}, lambda client, shard: None)
    assert torch.equal(server.model.weight, weight)
    assert state
    assert all(torch.equal(value, state[key]) for key, value in server.state_dict().items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_keeps_frozen_weights_and_averages_buffers(name):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    model[0].weight.requires_grad_(True)
    bias = model[0].bias.clone()
    move(server_of(model, OPTIMIZERS[name]), 3.0)
    assert torch.equal(model[0].bias, bias)
    assert set(model[1].running_mean.tolist()) == {3.0}
    assert model[0].weight.grad is None


@pytest.mark.parametrize("name", STATEFUL)
def test_step_after_freezing_and_unfreezing_moves_trainable_weights(name):
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    server = server_of(model, OPTIMIZERS[name])
    move(server)
    model.weight.requires_grad_(False)
    model.bias.requires_grad_(True)
    frozen, before = model.weight.clone(), model.bias.detach().clone()
    move(server, round=1)
    assert torch.equal(model.weight, frozen)
    assert not torch.equal(model.bias, before)


@pytest.mark.parametrize("name", STATEFUL)
def test_load_state_dict_in_a_new_server_continues_with_the_same_bits(name):
    first = server_of(model_at(1.0), OPTIMIZERS[name], averaged=iterate_average(model_at(1.0)))
    move(first)
    second = server_of(model_at(2.0), OPTIMIZERS[name], averaged=iterate_average(model_at(2.0)))
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    for server in (first, second):
        move(server, -0.3, round=1)
    torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(first.result.state_dict(), second.result.state_dict(), rtol=0, atol=0)


class CountingSGD(SGD):
    """SGD that divides its rate by a number of its own, as optimizers written by hand do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1
                weight.add_(weight.grad, alpha=-group["lr"] / self.state[weight]["steps"])


def test_load_state_dict_restores_numbers_and_the_rate_of_a_scheduler():
    servers, rates = [], []
    for _ in range(2):
        servers.append(server_of(model_at(1.0), lambda weights: CountingSGD(weights, lr=1.0)))
        rates.append(ExponentialLR(servers[-1].optimizer, 0.5))
    (whole, resumed), (rate, resumed_rate) = servers, rates
    for round in range(3):
        move(whole, 1.0, round)
        rate.step()
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.load_state_dict(whole.state_dict())
    resumed_rate.load_state_dict(rate.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == 0.125
    assert [state["steps"] for state in resumed.optimizer.state.values()] == [3, 3]
    for server, schedule in zip(servers, rates, strict=True):
        move(server, 1.0, 3)
        schedule.step()
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.0625
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_load_state_dict_restores_the_betas():
    first, second = (
        server_of(model_at(1.0), lambda weights, b=b: Adam(weights, betas=b)) for b in [(0.5, 0.6), (0.9, 0.99)]
    )
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def test_load_state_dict_of_a_model_raises_and_keeps_the_momentum():
    server = server_of(model_at(1.0), OPTIMIZERS["momentum"])
    move(server)
    with pytest.raises(UserError, match=r"weight is not of a server; pass what Server\.state_dict returned"):
        server.load_state_dict(server.model.state_dict())
    assert server.optimizer.state


@pytest.mark.parametrize("name", ["sgd", "nesterov", "yogi"])
def test_step_that_overflows_raises_an_error(name):
    server = server_of(nn.Sequential(nn.Linear(2, 2)), OPTIMIZERS[name])
    server.optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(UserError, match=r"made 0\.weight.* NaN or Inf; lower the learning rate"):
        move(server, 1e25)


def test_find_nonfinite_of_an_imaginary_part_names_it():
    assert find_nonfinite({"good": torch.ones(2) + 1j, "bad": torch.tensor([complex(0, torch.nan)])}) == "bad"


@pytest.mark.parametrize(("name", "other"), [("momentum", "adam"), ("adam", "nesterov")])
def test_load_state_dict_of_another_optimizer_or_model_raises(name, other):
    servers = [server_of(nn.Sequential(nn.Linear(2, 2)), OPTIMIZERS[each]) for each in (name, other)]
    for server in servers:
        move(server)
    renamed = {key.replace("0.weight", "x.weight"): value for key, value in servers[0].state_dict().items()}
    for state in (servers[1].state_dict(), renamed):
        with pytest.raises(UserError, match="another optimizer or model"):
            servers[0].load_state_dict(state)


REFUSED = [
    ({"optimizer": SGD(nn.Linear(3, 2).parameters(), lr=1.0)}, "has parameters of another model"),
    (
        {"averaged": iterate_average(nn.Linear(3, 4))},
        r"the average is of another model; make it with iterate_average\(model\)",
    ),
    *(({"max_share": value}, r"max_share is .*; pass a") for value in (0, -1, 1.5, nan, inf)),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_server_with_parts_of_another_model_or_a_wrong_share_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Server(model_at(1.0), ShardPlanner("dense"), **options)


def test_server_with_an_optimizer_that_cannot_step_all_weights_is_refused():
    model = model_at(1.0)
    with pytest.raises(UserError, match="LBFGS needs a closure"):
        Server(model, ShardPlanner("dense"), torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UserError, match="lacks bias"):
        Server(model, ShardPlanner("dense"), SGD([model.weight], lr=1.0))
    model.bias.requires_grad_(False)
    server = Server(model, ShardPlanner("dense"), SGD([model.weight], lr=1.0))
    model.bias.requires_grad_(True)
    with pytest.raises(UserError, match="lacks bias"):
        move(server)


@pytest.mark.parametrize("side", ["server", "client"])
def test_fused_step_of_channels_last_weights_equals_the_unfused_one(side):
    start, channels_last = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.channels_last
    weights = []

    def train(client, shard):
        changes = torch.Generator().manual_seed(1)
        values = {name: each + torch.randn(each.shape, generator=changes) for name, each in shard.trained().items()}
        if side == "client":
            values["0.weight"] = values["0.weight"].to(memory_format=channels_last)
        return shard.returned(values)

    for fused in (False, True):
        model = deepcopy(start).to(memory_format=channels_last if side == "server" else torch.contiguous_format)
        server = server_of(model, lambda weights, fused=fused: SGD(weights, lr=0.5, momentum=0.9, fused=fused))
        server.round(0, {"phone": 1.0}, train)
        weights.append(model[0].weight.detach().contiguous())
    torch.testing.assert_close(*weights)


def test_yogi_step_of_complex_weights_equals_that_of_their_pairs():
    whole, pairs = (torch.ones(2, dtype=torch.cdouble), torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.double))
    for part in (whole, pairs):
        weight = nn.Parameter(part)
        weight.grad = torch.full_like(part, 0.25 - 0.5j) if part.is_complex() else part.new_tensor([[0.25, -0.5]] * 2)
        FedYogi([weight], lr=0.5).step()
    torch.testing.assert_close(torch.view_as_real(whole), pairs)
