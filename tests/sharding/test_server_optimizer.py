"""The server's optimizers against their recursions, written out."""

import pytest
import torch
from torch import nn

from sharding import ServerOptimizer
from sharding.aggregation.server_optimizer import SERVER_OPTIMIZERS
from sharding.errors import UserError
from sharding.modules.finite import find_nonfinite


def model_at(value: float) -> nn.Module:
    model = nn.Linear(3, 2).double()
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return model


def play(name: str, ways: list[float], lr: float, momentum: float) -> list[float]:
    """Return where a model is after each round in which the clients' average lies `way` from where they started."""
    model = model_at(1.0)
    server, places = ServerOptimizer(model, name, lr, momentum), []
    for way in ways:
        with torch.no_grad():
            for weight in model.parameters():
                weight += server.rate * way
        server.step()
        places.append(float(model.weight[0, 0].detach()))
        assert len({float(x) for weight in model.parameters() for x in weight.detach().flatten()}) == 1
    return places


WAYS = [0.5, -0.25, 0.0625, 1.0]


def momentum_by_hand(lr: float, beta: float) -> list[float]:
    place, m, places = 1.0, 0.0, []
    for way in WAYS:
        m = beta * m + way
        place += lr * m
        places.append(place)
    return places


def nesterov_by_hand(lr: float, beta: float) -> list[float]:
    """W itself goes as with momentum; what is sent, and kept, is η_g·β·m ahead of it."""
    place, m, places = 1.0, 0.0, []
    for way in WAYS:  # Δ of the place that was sent
        m = beta * m + way
        place += lr * m
        places.append(place + lr * beta * m)
    return places


def adam_by_hand(lr: float, beta: float) -> list[float]:
    place, m, v, places = 1.0, 0.0, 0.0, []
    for t, way in enumerate(WAYS, start=1):
        m, v = beta * m + (1 - beta) * way, 0.99 * v + 0.01 * way**2
        place += lr * (m / (1 - beta**t)) / ((v / (1 - 0.99**t)) ** 0.5 + 1e-3)
        places.append(place)
    return places


@pytest.mark.parametrize(("lr", "beta"), [(1.0, 0.5), (0.3, 0.9)])
@pytest.mark.parametrize(
    ("name", "by_hand"), [("momentum", momentum_by_hand), ("nesterov", nesterov_by_hand), ("adam", adam_by_hand)]
)
def test_a_server_goes_as_its_recursion_says(name, by_hand, lr, beta):
    assert play(name, WAYS, lr, beta) == pytest.approx(by_hand(lr, beta), rel=1e-12)


def test_a_plain_server_leaves_its_step_to_the_average():
    assert play("plain", WAYS, 0.4, 0.9) == pytest.approx([1.2, 1.1, 1.125, 1.525], rel=1e-12)


@pytest.mark.parametrize("name", [name for name in SERVER_OPTIMIZERS if name != "plain"])
def test_a_lost_round_changes_nothing_and_is_not_remembered(name):
    model = model_at(1.0)
    server = ServerOptimizer(model, name, 0.5)
    with torch.no_grad():
        model.weight += 1
    server.step()
    place, held = model.weight.clone(), {key: value.clone() for key, value in server.state_dict().items()}
    server.step()
    assert torch.equal(model.weight, place)
    assert held
    assert all(torch.equal(value, held[key]) for key, value in server.state_dict().items())


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_frozen_weights_and_buffers_stay_where_the_average_put_them(name):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    model[0].weight.requires_grad_(True)
    server = ServerOptimizer(model, name, 0.5)
    with torch.no_grad():
        model[0].bias.fill_(7)
        model[1].running_mean.fill_(3)
        model[0].weight += 1
    server.step()
    assert set(model[0].bias.tolist()) == {7}
    assert set(model[1].running_mean.tolist()) == {3}
    assert model[0].weight.grad is None


@pytest.mark.parametrize("name", ["nesterov", "momentum", "adam"])
def test_weights_can_be_frozen_and_thawed_between_rounds(name):
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    server = ServerOptimizer(model, name, 0.1)

    def move(weight):
        server.remember()
        with torch.no_grad():
            weight += 1
        server.step()

    move(model.weight)
    model.weight.requires_grad_(False)
    model.bias.requires_grad_(True)
    frozen, before = model.weight.clone(), model.bias.detach().clone()
    move(model.bias)
    assert torch.equal(model.weight, frozen)
    assert not torch.allclose(model.bias, before + 1)
    assert {key.partition("/")[0] for key in server.state_dict()} == {"weight", "bias"}
    other = ServerOptimizer(model, name, 0.1)
    other.load_state_dict(server.state_dict())
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in server.state_dict().items())


@pytest.mark.parametrize("name", ["nesterov", "momentum", "adam"])
def test_a_step_that_is_not_finite_is_not_taken(name, caplog):
    model = nn.Sequential(nn.Linear(2, 2))
    server = ServerOptimizer(model, name, lr=1e30, momentum=0.9)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1e25
    server.step()
    assert torch.equal(model[0].weight, before)
    assert not server.state_dict()
    assert "skipped the server's step" in caplog.text


def test_an_imaginary_part_that_is_not_finite_is_found():
    assert find_nonfinite({"whole": torch.ones(2) + 1j, "lost": torch.tensor([complex(0, torch.nan)])}) == "lost"


def stepped(name):
    """Return an optimizer of that name that has taken one step."""
    model = nn.Sequential(nn.Linear(2, 2))
    server = ServerOptimizer(model, name, lr=0.1)
    with torch.no_grad():
        model[0].weight += 1
    server.step()
    return server


@pytest.mark.parametrize(("name", "other"), [("momentum", "adam"), ("adam", "nesterov")])
def test_a_state_of_another_optimizer_is_refused(name, other):
    server, state = stepped(name), stepped(other).state_dict()
    for spoiled in (
        state,
        {f"x.{key}": value for key, value in server.state_dict().items()},
        dict([*state.items()][:1]),
    ):
        with pytest.raises(UserError, match="another optimizer or model"):
            server.load_state_dict(spoiled)
