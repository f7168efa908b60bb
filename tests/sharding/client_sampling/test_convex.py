"""Every closed form against a general convex solver, and against the papers' own formulas."""

import numpy as np
import pytest

from sharding import optimal_inclusion
from sharding.client_sampling import mmfl_probabilities, wireless_probabilities
from tests.sharding.client_sampling import reference

EXCESS = 1e-9  # ours may be worse than the solver's feasible point by no more, relatively
SOLVED = 1e-5  # and the solver's own point must be this close, or it solved another problem


SEEDS = [pytest.param(seed, marks=[] if seed < 10 else pytest.mark.slow) for seed in range(200)]


def variance(a, p):
    return np.sum(np.divide(a**2, p, out=np.zeros_like(a), where=a > 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_inclusion_with_costs_equals_a_convex_solver(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 30))
    a, costs = rng.lognormal(0, 1.5, n), rng.uniform(0.05, 1, n)
    m = costs.sum() * rng.uniform(0.05, 0.95)
    if seed % 4 == 0:
        costs = np.ones(n)
        m = rng.uniform(0.5, n)
    p = optimal_inclusion(a, m, costs)
    assert abs(costs @ p - m) <= 1e-12 * m
    assert np.all((p > 0) & (p <= 1))
    if seed % 4 == 0:
        np.testing.assert_allclose(p, reference.ocs(a, m), rtol=1e-11)
    solved = variance(a, reference.solve_inclusion(a, m, costs))
    assert variance(a, p) <= solved * (1 + EXCESS)
    assert solved <= variance(a, p) * (1 + SOLVED)


@pytest.mark.parametrize("seed", SEEDS)
def test_mmfl_probabilities_equal_a_convex_solver(seed):
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(2, 12)), int(rng.integers(1, 5)))
    a, m = rng.lognormal(0, 1.5, shape), rng.uniform(0.3, shape[0] - 0.05)
    p = mmfl_probabilities(a, m)
    assert abs(p.sum() - m) <= 1e-12 * m
    assert np.all(p > 0)
    assert np.all(p.sum(axis=1) <= 1 + 1e-12)
    np.testing.assert_allclose(p, reference.mmfl(a, m), rtol=1e-11)
    solved = variance(a, reference.solve_mmfl(a, m))
    assert variance(a, p) <= solved * (1 + EXCESS)
    assert solved <= variance(a, p) * (1 + SOLVED)


@pytest.mark.parametrize("ratio", [0.0, 1e-12, 1e-3, 1.0, 1e6, 1e20])
def test_wireless_probabilities_satisfy_the_stationarity_conditions(ratio):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, c = rng.lognormal(0, 2, 50), rng.exponential(1, 50) + 1e-3
        p = np.full(50, 1 / 50)
        q = wireless_probabilities(p, a, c, ratio, 4)
        b = (a / 50) ** 2 / 4
        slope = c * (np.sum(b / q) + ratio) - (q @ c) * b / q**2
        scale = c * (np.sum(b / q) + ratio) + (q @ c) * b / q**2
        assert np.ptp(slope) <= 1e-9 * scale.max()
        ours = reference.wireless_objective(q, a / 50, c, ratio, 4)
        for other in rng.dirichlet(np.ones(50), 20):
            assert ours <= reference.wireless_objective(0.5 * (q + other), a / 50, c, ratio, 4)


def test_mmfl_probabilities_with_zero_norms_share_the_rest_evenly():
    np.testing.assert_allclose(mmfl_probabilities(np.zeros((4, 2)), 2), np.full((4, 2), 0.25))
    p = mmfl_probabilities([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], 2.5)
    np.testing.assert_allclose(p, [[0.25, 0.25], [1, 0], [0, 1]])
