import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sharding import collective_inclusion
from tests import reference
from tests.sharding.inclusion.spectra import magnitudes

CLIENTS = st.sampled_from([2, 3, 10, 1000])


@given(magnitudes(), CLIENTS, st.data())
def test_collective_inclusion_equals_the_papers_algorithm(lam, num_clients, data):
    n = data.draw(st.integers(1, lam.size - 1))
    pi, omega = collective_inclusion(lam, n, num_clients)
    np.testing.assert_allclose(pi, reference.collective_inclusion(lam, n, num_clients), rtol=0, atol=1e-12)
    np.testing.assert_allclose(omega, num_clients / (1 + pi * (num_clients - 1)), rtol=1e-15)


@given(magnitudes(largest_size=40), CLIENTS, st.data())
def test_collective_inclusion_satisfies_the_kkt_conditions(lam, num_clients, data):
    n = data.draw(st.integers(1, lam.size))
    pi, _ = collective_inclusion(lam, n, num_clients)
    assert np.all((pi >= 0) & (pi <= 1))
    np.testing.assert_allclose(pi.sum(), n, atol=1e-9)
    # −∂/∂π Σ λ²(1 − π)/(1 + π(C − 1)) = C·λ²/(1 + π(C − 1))² is one multiplier, in between.
    slope = (lam / (1 + pi * (num_clients - 1))) ** 2
    least_in, most_out = slope[pi > 0].min(), slope[pi < 1].max(initial=0.0)
    assert most_out <= least_in * (1 + 1e-8)


def test_collective_inclusion_of_one_client_is_the_top_terms_in_order():
    pi, omega = collective_inclusion([1.0, 3.0, 1.0, 2.0, 1.0], 3, 1)
    np.testing.assert_array_equal(pi, [1, 1, 0, 1, 0])
    np.testing.assert_array_equal(omega, np.ones(5))


def test_collective_inclusion_of_all_terms_is_certain():
    pi, omega = collective_inclusion([1.0, 1e-9, 0.3], 3, 10)
    np.testing.assert_array_equal(pi, np.ones(3))
    np.testing.assert_array_equal(omega, np.ones(3))


def test_collective_inclusion_with_zero_magnitudes_shares_the_rest_evenly():
    np.testing.assert_array_equal(collective_inclusion([0.0, 2.0, 0.0, 1.0], 2, 5)[0], [0, 1, 0, 1])
    np.testing.assert_array_equal(collective_inclusion([0.0, 2.0, 0.0, 1.0], 3, 1)[0], [0.5, 1, 0.5, 1])
    np.testing.assert_array_equal(collective_inclusion(np.zeros(4), 1, 3)[0], np.full(4, 0.25))
