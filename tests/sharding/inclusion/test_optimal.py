import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sharding import optimal_inclusion
from tests import reference
from tests.sharding.inclusion.spectra import magnitudes


@given(magnitudes(), st.data())
def test_optimal_inclusion_equals_the_papers_algorithm(lam, data):
    n = data.draw(st.integers(1, lam.size - 1))
    np.testing.assert_allclose(optimal_inclusion(lam, n), reference.unbiased_inclusion(lam, n), rtol=1e-11, atol=1e-13)


@given(magnitudes(), st.data())
def test_optimal_inclusion_with_costs_satisfies_the_kkt_conditions(a, data):
    costs = np.array(data.draw(st.lists(st.floats(0.05, 20), min_size=a.size, max_size=a.size)))
    budget = costs.sum() * data.draw(st.floats(0.01, 1.0))
    p = optimal_inclusion(a, budget, costs)
    assert np.all((p > 0) & (p <= 1))
    np.testing.assert_allclose(costs @ p, budget, rtol=1e-12)
    # −∂/∂p Σ a²/p per unit of cost is one multiplier for all p < 1, and no less where p = 1.
    slope = a**2 / p**2 / costs
    free = p < 1
    if free.any():
        np.testing.assert_allclose(slope[free], slope[free].max(), rtol=1e-9)
        assert np.all(slope[~free] >= slope[free].max() * (1 - 1e-9))


def test_optimal_inclusion_is_invariant_to_order_and_scale():
    lam = np.array([1.0, 5.0, 0.2, 3.0, 3.0])
    shuffle = [4, 2, 0, 1, 3]
    pi = optimal_inclusion(lam, 2)
    np.testing.assert_allclose(optimal_inclusion(lam[shuffle], 2), pi[shuffle], rtol=1e-14)
    np.testing.assert_allclose(optimal_inclusion(lam * 1e-200, 2), pi, rtol=1e-14)


def test_optimal_inclusion_with_zero_magnitudes_shares_the_rest_evenly():
    np.testing.assert_array_equal(optimal_inclusion([0.0, 2.0, 0.0, 1.0], 2), [0, 1, 0, 1])
    np.testing.assert_array_equal(optimal_inclusion([0.0, 2.0, 0.0, 1.0], 3), [0.5, 1, 0.5, 1])
    np.testing.assert_allclose(optimal_inclusion([0.0, 2.0, 0.0], 4.0, [1.0, 3.0, 3.0]), [0.25, 1, 0.25])
    np.testing.assert_array_equal(optimal_inclusion(np.zeros(4), 3), np.full(4, 0.75))


@given(magnitudes(), st.data())
def test_optimal_inclusion_with_a_budget_for_all_is_exactly_one(a, data):
    np.testing.assert_array_equal(optimal_inclusion(a, a.size), np.ones(a.size))
    costs = np.array(data.draw(st.lists(st.floats(0.05, 20), min_size=a.size, max_size=a.size)))
    np.testing.assert_array_equal(optimal_inclusion(a, costs.sum(), costs), np.ones(a.size))
