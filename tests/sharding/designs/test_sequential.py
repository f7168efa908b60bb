"""Designs that decide step by step or with one uniform: Brewer, minimum support."""

from collections import defaultdict

import numpy as np
import pytest

from sharding import DESIGNS, optimal_inclusion
from tests import reference
from tests.sharding.designs.scripted import Scripted, distribution_of, pieces
from tests.sharding.inclusion.spectra import SPECTRA

CASES = [
    np.array([0.1, 0.25, 0.5, 0.55, 0.6]),
    np.array([0.2, 0.4, 0.6, 0.801, 0.999]),
    np.array([0.7, 0.7, 0.8, 0.8]),
    np.array([0.5, 0.5, 0.5, 0.5]),
]


@pytest.mark.parametrize("pi", CASES)
def test_brewer_decision_tree_equals_the_published_distribution(pi):
    n = round(pi.sum())
    sampler = DESIGNS["brewer"](pi, n)
    distribution = distribution_of(lambda uniforms: sampler.draw(Scripted(*uniforms), 1)[0], n)
    expected = reference.brewer_distribution(pi)
    assert set(distribution) == set(expected)
    for chosen, chance in expected.items():
        assert distribution[chosen] == pytest.approx(chance, abs=1e-9)
    np.testing.assert_allclose(reference.inclusion_of(distribution, pi.size), pi, rtol=0, atol=1e-9)


def one_uniform_distribution(pi):
    sampler = DESIGNS["minimum_support"](pi, round(pi.sum()))

    def outcome(u):
        return tuple(sorted(sampler.draw(Scripted([u]), 1)[0].tolist()))

    distribution = defaultdict(float)
    for length, middle in pieces(outcome, grid=2000):
        distribution[outcome(middle)] += length
    return dict(distribution)


@pytest.mark.parametrize("pi", [*CASES, np.array([0.05, 0.15, 0.3, 0.35, 0.45, 0.8, 0.9])])
def test_minimum_support_has_exact_inclusion_and_few_samples(pi):
    distribution = one_uniform_distribution(pi)
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(reference.inclusion_of(distribution, pi.size), pi, rtol=0, atol=1e-9)
    assert len(distribution) <= pi.size


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("n", [1, 20, 199])
def test_minimum_support_of_large_spectra_is_a_mixture_of_few_samples(spectrum, n):
    pi = optimal_inclusion(SPECTRA[spectrum](200), n)
    free = pi[(pi > 1e-14) & (pi < 1)]
    count = round(free.sum())
    if not 0 < count < free.size:
        pytest.skip("nothing is left to chance")
    design = DESIGNS["minimum_support"](free, count)
    weights = np.diff(design.cumulative, prepend=0.0)
    assert len(weights) <= free.size
    assert np.all(weights >= 0)
    mixture = np.zeros(free.size)
    for chosen, weight in zip(design.samples, weights, strict=True):
        assert len(set(chosen.tolist())) == count
        mixture[chosen] += weight
    np.testing.assert_allclose(mixture, free, rtol=0, atol=1e-12)
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
