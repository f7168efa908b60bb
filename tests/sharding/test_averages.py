"""The norm bound against attackers, and the change of a weight by its definition."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from sharding import NormBound, Shard, Update
from sharding.layers import as_blocks, num_blocks
from sharding.matrices.spectrum import compose, decompose_batch
from sharding.rounds.aggregation import means
from sharding.rounds.norms import update_norm
from tests.sharding.models import aggregate, along, make_net, make_plan, perturbed

CLIENTS = [f"c{i}" for i in range(9)]
SAMPLES = {client: 1.0 + i for i, client in enumerate(CLIENTS)}
HONEST_SCALE = 0.01  # of the honest clients' changes


def moved(shard: Shard, seed: int, factor: float = 1.0) -> Update:
    """A shard after an honest step, or `factor` times that step."""
    return along(shard, perturbed(shard, seed), factor * HONEST_SCALE)


def make_round(strategy="full", ratio=0.5, attack=1.0, attackers=0):
    """(model, plan, updates): the first clients' steps are `attack` times what they should be."""
    model = make_net().double()
    plan = make_plan(model, dict.fromkeys(CLIENTS, ratio), strategy)
    factors = [attack] * attackers + [1.0] * (len(CLIENTS) - attackers)
    return model, plan, {c: moved(plan.shard(c), 7, factor) for c, factor in zip(CLIENTS, factors, strict=True)}


def distance(model, other) -> float:
    """Largest difference of two models' weights."""
    return max(float((tensor - other.state_dict()[name]).abs().max()) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("strategy", ["unbiased", "dense"])
@pytest.mark.parametrize("attack", [1e6, -1e6, 1e30])
def test_norm_bound_with_attackers_rejects_exactly_them(strategy, attack):
    model, plan, updates = make_round(strategy, attack=attack, attackers=2)
    honest = deepcopy(model)
    aggregate(honest, plan, {client: updates[client] for client in CLIENTS[2:]}, SAMPLES)
    outcome = aggregate(model, plan, updates, SAMPLES, guards=[NormBound(4)])
    assert (outcome.accepted, list(outcome.rejected)) == (CLIENTS[2:], CLIENTS[:2])
    assert "is above 4 times the median" in outcome.rejected["c0"].message
    assert distance(model, honest) == 0


def test_norm_bound_with_two_clients_rejects_the_larger_update():
    model, plan, updates = make_round(attack=1e6, attackers=1)
    outcome = aggregate(
        model, plan, {c: updates[c] for c in CLIENTS[:2]}, dict.fromkeys(CLIENTS[:2], 1), guards=[NormBound(2)]
    )
    assert outcome.accepted == ["c1"]


@pytest.mark.parametrize("spoiled", [".weight", ".running_mean"])
def test_norm_bound_with_batch_norms_rejects_long_parameters_and_long_statistics(spoiled):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)).double()
    plan = make_plan(model, dict.fromkeys(CLIENTS, 0.5), "dense")
    updates, norms = {}, {}
    for client, shard in plan.shards():
        steps = {name: 1.0 if name.endswith("running_mean") else 0.01 for name in shard.trained()}
        if client == "c0":
            steps = {name: step * (40 if name.endswith(spoiled) else 1) for name, step in steps.items()}
        updates[client] = shard.returned({name: value + steps[name] for name, value in shard.trained().items()})
        norms[client] = float(update_norm(shard, updates[client]))
    outcome = aggregate(model, plan, updates, SAMPLES, guards=[NormBound(2)])
    assert (outcome.accepted, list(outcome.rejected)) == (CLIENTS[1:], CLIENTS[:1])
    assert norms["c1"] == pytest.approx(0.01 * sum(part.numel() for part in model.parameters()) ** 0.5)


def test_norm_bound_without_outliers_changes_nothing():
    model, plan, updates = make_round("unbiased")
    other = deepcopy(model)
    aggregate(model, plan, updates, SAMPLES)
    aggregate(other, plan, updates, SAMPLES, guards=[NormBound(100)])
    assert distance(model, other) == 0


@pytest.mark.parametrize("kind", [nn.Linear(9, 7), nn.Conv2d(6, 14, 2, groups=2)], ids=["linear", "grouped"])
def test_weight_change_in_strips_equals_the_difference_of_products(kind, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn_like(kind.weight, dtype=torch.float64)
    spectrum = decompose_batch([as_blocks(weight, num_blocks(kind))])[0].keep(torch.tensor([0, 2, 3]))
    u, v = torch.randn_like(spectrum.u), torch.randn_like(spectrum.v)
    monkeypatch.setattr(means, "STRIP", 3)  # of 7 rows
    expected = compose(u, v, spectrum.blocks) - compose(spectrum.u, spectrum.v, spectrum.blocks)
    torch.testing.assert_close(means.weight_change(spectrum, u, v), expected, rtol=0, atol=1e-12)
    assert not means.weight_change(spectrum, spectrum.u, spectrum.v).any()
