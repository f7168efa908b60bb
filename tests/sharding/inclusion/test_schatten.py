import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import optimal_inclusion
from sharding.terms.inclusion import schatten_inclusion
from tests.sharding.inclusion.spectra import SPECTRA, magnitudes


@given(magnitudes(largest_size=30), st.floats(2, 8), st.data())
def test_schatten_inclusion_satisfies_the_kkt_conditions(lam, p, data):
    n = data.draw(st.integers(1, lam.size))
    pi = schatten_inclusion(lam, n, p)
    assert np.all((pi > 0) & (pi <= 1))
    np.testing.assert_allclose(pi.sum(), n, rtol=1e-12)
    # −f'(π) of the definition, differentiated by hand without the substitution that the code makes.
    odds = 1 / pi - 1
    slope = 1 - odds**p + p * odds ** (p - 1) / pi
    log_slope = p * np.log(lam) + np.log(slope)
    free = pi < 1
    if free.any():
        multiplier = log_slope[free].max()
        np.testing.assert_allclose(log_slope[free], multiplier, rtol=0, atol=1e-8)
        assert np.all(log_slope[~free] >= multiplier - 1e-8)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("n", [1, 7, 39, 40])
def test_schatten_inclusion_with_p_2_equals_optimal_inclusion(spectrum, n):
    lam = SPECTRA[spectrum](40)
    np.testing.assert_allclose(schatten_inclusion(lam, n, 2), optimal_inclusion(lam, n), rtol=1e-10)


def test_schatten_inclusion_with_zero_magnitudes_shares_the_rest_evenly():
    np.testing.assert_array_equal(schatten_inclusion([0.0, 2.0, 0.0, 1.0], 3), [0.5, 1, 0.5, 1])
    np.testing.assert_array_equal(schatten_inclusion([0.0, 2.0, 1.0], 1)[0], 0.0)
