"""Inclusion of zero magnitudes of either sign, both of which LAPACK returns, and of extreme magnitudes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import UserError, collective_inclusion, optimal_inclusion, successive_inclusion
from sharding.terms.inclusion import schatten_inclusion

INCLUSIONS = {
    "optimal": lambda magnitudes, n, clients: (optimal_inclusion(magnitudes, n),),
    "collective": collective_inclusion,
    "schatten": lambda magnitudes, n, clients: (schatten_inclusion(magnitudes, n),),
    "schatten, p = 8": lambda magnitudes, n, clients: (schatten_inclusion(magnitudes, n, 8),),
    "successive": lambda magnitudes, n, clients: (successive_inclusion(magnitudes, n),),
}
POSITIVE = st.lists(st.one_of(st.floats(1e-6, 10.0), st.just(1.0)), max_size=6)
ZEROS = st.lists(st.sampled_from([0.0, -0.0]), min_size=1, max_size=4)
CLIENTS = st.sampled_from([1, 2, 4, 100])


@pytest.mark.parametrize("name", INCLUSIONS)
@given(POSITIVE, ZEROS, CLIENTS, st.data())
def test_inclusion_with_negative_zeros_equals_positive_zeros(name, positive, zeros, clients, data):
    magnitudes = np.array(data.draw(st.permutations(positive + zeros)))
    n = data.draw(st.integers(1, magnitudes.size))
    inclusion_of = INCLUSIONS[name]
    if name == "successive" and n > len(positive):
        with pytest.raises(UserError, match="a weight of 0 is never drawn"):
            inclusion_of(magnitudes, n, clients)
        return
    made, expected = inclusion_of(magnitudes, n, clients), inclusion_of(np.abs(magnitudes), n, clients)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(made[0].sum(), n, atol=1e-9)
    assert np.all((made[0] >= 0) & (made[0] <= 1) & ~np.signbit(made[0]))


@pytest.mark.parametrize("name", INCLUSIONS)
@pytest.mark.parametrize("least", [1e-30, 1e-200, 1e-290, 1e-310, 5e-324])
@pytest.mark.parametrize("others", [np.geomspace(1e-3, 1e-6, 4), 10.0 ** -np.arange(10, 30, 5)], ids=str)
def test_inclusion_of_extreme_magnitudes_is_feasible_and_ordered(name, others, least):
    magnitudes = np.array([1.0, *others, least, least])
    for n in (1, 3, 5, 6)[: 3 if name == "successive" else 4]:  # which draws no weight of 0
        inclusion = INCLUSIONS[name](magnitudes, n, 3)[0]
        assert np.all((inclusion >= 0) & (inclusion <= 1))
        assert np.all(np.diff(inclusion) <= (1e-15 if name == "successive" else 0))
        np.testing.assert_allclose(inclusion.sum(), n, rtol=1e-12)
