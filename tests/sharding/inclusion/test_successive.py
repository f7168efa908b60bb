from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from sharding import successive_inclusion
from tests import reference

ORDERS = [0, -1, -4, -12, -30]  # of magnitude


def spread_weights():
    exponents = st.one_of(st.sampled_from(ORDERS), st.floats(-30, 0), st.floats(-1, 0))
    return st.lists(exponents, min_size=2, max_size=6).map(lambda e: 10.0 ** np.array(e))


@given(spread_weights(), st.data())
def test_successive_inclusion_equals_the_enumeration_of_all_orders(weights, data):
    n = data.draw(st.integers(1, weights.size))
    expected = reference.inclusion_of(reference.successive_distribution(weights, n), weights.size)
    np.testing.assert_allclose(successive_inclusion(weights, n), expected, rtol=0, atol=1e-11)


def test_successive_inclusion_of_tiny_weights_is_relatively_accurate():
    weights = np.array([1.0, 1.0, 0.3, 0.25, 1e-2, 1e-3, 1e-15, 1e-30])
    expected = reference.inclusion_of(reference.successive_distribution(weights, 5), 8)
    np.testing.assert_allclose(successive_inclusion(weights, 5), expected, rtol=1e-9)


@pytest.mark.parametrize("n", [2, 52, 256, 511])
@pytest.mark.parametrize("decay", ["power", "geometric", "flat", "two levels"])
def test_successive_inclusion_with_twice_the_nodes_is_equal(decay, n, monkeypatch):
    i = np.arange(512)
    weights = {
        "power": (i + 1.0) ** -2,
        "geometric": 10.0 ** (-30 * i / 511),
        "flat": np.ones(512),
        "two levels": np.where(i < 256, 1.0, 1e-30),
    }[decay]
    pi = successive_inclusion(weights, n)
    monkeypatch.setattr("sharding.terms.inclusion.successive.NODES", 24)
    np.testing.assert_allclose(pi, successive_inclusion(weights, n), rtol=0, atol=1e-12)
    np.testing.assert_allclose(pi.sum(), n, rtol=0, atol=1e-9)
    if decay == "flat":
        np.testing.assert_allclose(pi, n / 512, rtol=0, atol=1e-12)


def test_successive_inclusion_is_zero_for_zeros_and_invariant_to_scale():
    pi = successive_inclusion([3.0, 0.0, 1.0, 2.0], 2)
    assert pi[1] == 0.0
    np.testing.assert_allclose(pi[[0, 2, 3]], successive_inclusion([3e-200, 1e-200, 2e-200], 2), atol=1e-14)
    np.testing.assert_array_equal(successive_inclusion([3.0, 0.0, 1.0], 2), [1, 0, 1])


def asymptotic(weights, n):
    """1 − e^(−s·w) with Σπ = n."""
    return -np.expm1(-weights * np.exp(brentq(lambda s: -np.expm1(-weights * np.exp(s)).sum() - n, -20, 60)))


@pytest.mark.parametrize(("size", "bound"), [(64, 0.084), (256, 0.020), (512, 0.010)])
def test_asymptotic_inclusion_has_the_documented_error(size, bound):
    worst = 0.0
    for fall, (ratio, exponent) in product((0.3, 0.5, 0.7, 1.0), ((0.1, 4), (0.2, 4), (0.3, 2.5), (0.4, 2.5))):
        weights = np.arange(1, size + 1.0) ** (-fall * exponent)
        exact, rough = (inclusion(weights, ceil(size * ratio)) for inclusion in (successive_inclusion, asymptotic))
        worst = max(worst, np.abs(rough / exact - 1).max())
    assert 0.9 * bound < worst < bound
