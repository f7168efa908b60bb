from itertools import product

import numpy as np
import pytest

from sharding import optimal_inclusion
from sharding.client_sampling import improvement_factors


def test_improvement_factors_alpha_equals_the_ratio_of_enumerated_variances():
    norms, budget = np.array([3.0, 1.0, 0.5, 0.5, 2.0]), 2.0

    def variance(p):
        vectors = np.diag(norms)
        return sum(
            np.prod(np.where(draw, p, 1 - p)) * np.sum((np.array(draw) / p @ vectors - vectors.sum(0)) ** 2)
            for draw in product([0, 1], repeat=norms.size)
        )

    p = optimal_inclusion(norms, budget)
    alpha, gamma = improvement_factors(norms, p, budget)
    assert alpha == pytest.approx(variance(p) / variance(np.full(5, budget / 5)), rel=1e-12)
    assert gamma == pytest.approx(budget / (alpha * 3 + budget))


def test_improvement_factors_of_uniform_full_or_zero_norms_are_exact():
    uniform = np.full(4, 0.5)
    assert improvement_factors([1, 2, 3, 4], uniform, 2) == pytest.approx((1.0, 0.5))
    assert improvement_factors([1, 2, 3, 4], np.ones(4), 4) == (0.0, 1.0)
    assert improvement_factors([1, 0, 0, 4], optimal_inclusion([1, 0, 0, 4], 2), 2) == (0.0, 1.0)
    assert improvement_factors(np.zeros(4), uniform, 2) == (0.0, 1.0)
