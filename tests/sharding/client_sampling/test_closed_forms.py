"""Closed forms against the papers' own formulas, and the conditions that only an optimum satisfies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sharding import optimal_inclusion
from sharding.client_sampling import mmfl_probabilities, wireless_probabilities
from tests.sharding.client_sampling import reference

NORM = st.floats(-4, 4).map(np.exp) | st.just(1.0)
SHARES = st.floats(0.01, 0.99)
NORMS = st.tuples(st.integers(2, 12), st.integers(1, 4)).flatmap(lambda shape: arrays(float, shape, elements=NORM))


@given(st.lists(NORM, min_size=2, max_size=30).map(np.array), SHARES)
def test_optimal_inclusion_equals_the_formula_of_chen_et_al(a, share):
    np.testing.assert_allclose(optimal_inclusion(a, share * a.size), reference.ocs(a, share * a.size), rtol=1e-11)


@given(NORMS, SHARES)
def test_mmfl_probabilities_equal_the_papers_formula_and_satisfy_the_kkt_conditions(a, share):
    m = share * len(a)
    p = mmfl_probabilities(a, m)
    np.testing.assert_allclose(p, reference.mmfl(a, m), rtol=1e-11)
    assert abs(p.sum() - m) <= 1e-12 * m
    assert np.all(p > 0)
    assert np.all(p.sum(axis=1) <= 1 + 1e-12)
    # −∂/∂p Σ a²/p is one multiplier in a row, the same in all rows that sum to less than 1, and no less in the others.
    slope = (a / p) ** 2
    np.testing.assert_allclose(slope, np.broadcast_to(slope[:, :1], a.shape), rtol=1e-9)
    free = p.sum(axis=1) < 1 - 1e-9
    if free.any():
        np.testing.assert_allclose(slope[free], slope[free].max(), rtol=1e-9)
        assert np.all(slope >= slope[free].max() * (1 - 1e-9))


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
