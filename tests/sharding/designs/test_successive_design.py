import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.designs import DESIGNS, successive_design
from sharding.inclusion import optimal_inclusion, successive_inclusion
from tests import reference
from tests.sharding.designs.scripted import Scripted
from tests.sharding.inclusion.spectra import SPECTRA


@pytest.mark.parametrize("pi", [[0.1, 0.25, 0.5, 0.55, 0.6], [0.7, 0.7, 0.8, 0.8], [1e-9, 0.5, 0.5 - 1e-9, 0.9, 0.1]])
def test_weights_are_found_that_honor_pi(pi):
    pi = np.array(pi)
    race = DESIGNS["successive"](pi, round(pi.sum()))
    law = reference.successive_law(np.exp(race.log_rates), round(pi.sum()))
    np.testing.assert_allclose(reference.inclusion_of(law, pi.size), pi, rtol=0, atol=1e-11)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("n", [1, 13, 127])
def test_weights_are_found_for_spectra(spectrum, n):
    pi = optimal_inclusion(SPECTRA[spectrum](128), n)
    free = pi[(pi > 1e-14) & (pi < 1)]
    count = round(free.sum())
    if not 0 < count < free.size:
        pytest.skip("nothing is left to chance")
    rates = DESIGNS["successive"](free, count).log_rates
    np.testing.assert_allclose(successive_inclusion(np.exp(rates - rates.max()), count), free, rtol=0, atol=1e-10)


@given(st.floats(1e-6, 0.999), st.floats(1e-6, 1e6))
def test_finishing_times_are_exponential_with_the_rates(u, ratio):
    """Of two runners, the second wins exactly when E₁/w₁ < E₀/w₀, E = −log(1 − u)."""
    design = successive_design([1.0, ratio], 1)
    threshold = -np.expm1(np.log1p(-u) * ratio)
    for factor, winner in [(1 - 1e-9, 1), (1 + 1e-9, 0)]:
        other = threshold * factor
        if 0 < other < 1 and threshold < 1 - 1e-6:
            assert design.draw(Scripted([u, other])).tolist() == [winner]


def test_the_first_n_to_finish_are_drawn_from_any_span_of_weights():
    weights = np.array([1e-30, 1.0, 1e-15, 0.0, 1e-5])
    design = successive_design(weights, 3)
    half = np.full(5, 0.5)
    assert design.draw(Scripted(half)).tolist() == [1, 2, 4]
    assert design.draw(np.random.default_rng(0), 7).tolist() == [[1, 2, 4]] * 7
    assert successive_design(weights, 4).draw(np.random.default_rng(0)).tolist() == [0, 1, 2, 4]
