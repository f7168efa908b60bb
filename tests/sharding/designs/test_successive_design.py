import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sharding.terms.designs import successive_design
from tests.sharding.designs.scripted import Scripted


@given(st.floats(1e-6, 0.999), st.floats(1e-6, 1e6))
def test_successive_design_of_two_terms_compares_exponential_times(u, ratio):
    """Of two runners, the second wins exactly when E₁/w₁ < E₀/w₀, E = −log(1 − u)."""
    design = successive_design([1.0, ratio], 1)
    threshold = -np.expm1(np.log1p(-u) * ratio)
    for factor, winner in [(1 - 1e-9, 1), (1 + 1e-9, 0)]:
        other = threshold * factor
        if 0 < other < 1 and threshold < 1 - 1e-6:
            assert design.draw(Scripted([u, other])).tolist() == [winner]


def test_successive_design_with_extreme_weights_draws_the_first_n():
    weights = np.array([1e-30, 1.0, 1e-15, 0.0, 1e-5])
    design = successive_design(weights, 3)
    half = np.full(5, 0.5)
    assert design.draw(Scripted(half)).tolist() == [1, 2, 4]
    assert design.draw(np.random.default_rng(0), 7).tolist() == [[1, 2, 4]] * 7
    assert successive_design(weights, 4).draw(np.random.default_rng(0)).tolist() == [0, 1, 2, 4]
