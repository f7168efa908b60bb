"""Magnitudes of zero, of either sign: LAPACK returns both, and they mean the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import STRATEGIES, UserError
from sharding.inclusion import (
    collective_inclusion,
    optimal_inclusion,
    schatten_inclusion,
    successive_inclusion,
)
from sharding.strategies import LayerContext

INCLUSIONS = {
    "optimal": lambda magnitudes, n, clients: (optimal_inclusion(magnitudes, n),),
    "collective": collective_inclusion,
    "schatten": lambda magnitudes, n, clients: (schatten_inclusion(magnitudes, n),),
    "exact": lambda magnitudes, n, clients: (successive_inclusion(magnitudes, n),),
    "asymptotic": lambda magnitudes, n, clients: (successive_inclusion(magnitudes, n, "asymptotic"),),
}
LAWS = [name for name, strategy in STRATEGIES.items() if strategy.allocate is not None]
POSITIVE = st.lists(st.one_of(st.floats(1e-6, 10.0), st.just(1.0)), max_size=6)
ZEROS = st.lists(st.sampled_from([0.0, -0.0]), min_size=1, max_size=4)
CLIENTS = st.sampled_from([1, 2, 4, 100])


@pytest.mark.parametrize("name", INCLUSIONS)
@given(POSITIVE, ZEROS, CLIENTS, st.data())
def test_a_zeros_sign_changes_no_inclusion(name, positive, zeros, clients, data):
    magnitudes = np.array(data.draw(st.permutations(positive + zeros)))
    n = data.draw(st.integers(1, magnitudes.size))
    inclusion_of = INCLUSIONS[name]
    if name in ("exact", "asymptotic") and n > len(positive):
        with pytest.raises(UserError, match="a weight of 0 is never drawn"):
            inclusion_of(magnitudes, n, clients)
        return
    made, expected = inclusion_of(magnitudes, n, clients), inclusion_of(np.abs(magnitudes), n, clients)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(made[0].sum(), n, atol=1e-9)
    assert np.all((made[0] >= 0) & (made[0] <= 1) & ~np.signbit(made[0]))


@pytest.mark.parametrize("name", LAWS)
@given(POSITIVE, ZEROS, CLIENTS, st.data())
def test_a_zeros_sign_changes_no_law(name, positive, zeros, clients, data):
    magnitudes = np.array(sorted(positive, reverse=True) + zeros)
    n = data.draw(st.integers(1, magnitudes.size))
    law_of = STRATEGIES[name].allocate
    made, expected = (law_of(LayerContext(each, n, clients, 0.5)) for each in (magnitudes, np.abs(magnitudes)))
    np.testing.assert_array_equal(made.inclusion, expected.inclusion)
    np.testing.assert_array_equal(made.multipliers, expected.multipliers)
    np.testing.assert_allclose(made.inclusion.sum(), n, atol=1e-9)
    assert np.all(np.isfinite(made.multipliers) & (made.multipliers > 0))
