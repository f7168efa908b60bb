"""The average of a run's models against its closed form."""

from math import comb

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from sharding import iterate_average


def walk(rounds: int) -> list[float]:
    rng = torch.Generator().manual_seed(3)
    return torch.randn(rounds, generator=rng, dtype=torch.float64).cumsum(0).tolist()


def average_of(values: list[float]) -> float:
    """Return the average after these rounds."""
    model = nn.Linear(2, 1).double()
    average = iterate_average(model)
    for value in values:
        for weight in model.parameters():
            nn.init.constant_(weight, value)
        average.update_parameters(model)
    return float(average.module.weight[0, 1].detach())


@pytest.mark.parametrize("rounds", [1, 2, 7, 60])
def test_iterate_average_weighs_rounds_by_their_eighth_power(rounds):
    """Unrolled, round s of t has (η+1)/(t+η) · Π_{s<k≤t} … ∝ (s+η−1 choose η): s(s+1)…(s+7) for η = 8."""
    values = walk(rounds)
    weights = [comb(s + 7, 8) for s in range(1, rounds + 1)]
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert average_of(values) == pytest.approx(mean, rel=1e-10)


def test_iterate_average_copies_the_last_buffers():
    model = nn.BatchNorm1d(2)
    average = iterate_average(model)
    for mean in (1.0, 5.0):
        model.running_mean.fill_(mean)
        average.update_parameters(model)
    assert average.module.running_mean.tolist() == model.running_mean.tolist() == [5, 5]
    assert average.module.weight is not model.weight


def test_iterate_average_of_pruned_and_integer_parameters_works():
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), nn.Linear(4, 4))
    model.count = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    average = iterate_average(model)
    for step in (1.0, 2.0):
        with torch.no_grad():
            model[0].weight_orig.fill_(step)
            model.count.fill_(int(step))
        average.update_parameters(model)
    assert average.module.count.tolist() == [2, 2, 2]
    assert average.module[0].weight_orig[0, 0].item() == pytest.approx(1.9)
