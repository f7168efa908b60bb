"""Theorems about inclusion and design together, by enumerating every sample of a small problem."""

from itertools import product

import numpy as np
import pytest

from sharding import collective_inclusion, optimal_inclusion
from sharding.terms.designs.conditional_poisson import fit_cps
from tests import reference

SPECTRUM = np.array([2.0, 1.5, 1.0, 0.4, 0.3])
TERMS = 2


def factors(seed=0):
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.normal(size=(6, 5)))[0]
    v = np.linalg.qr(rng.normal(size=(7, 5)))[0]
    return u, v


def sample_distribution(pi):
    """Return the distribution of one client's sample under CPS, terms with π = 1 or 0 included."""
    free = np.flatnonzero((pi > 0) & (pi < 1))
    certain = tuple(np.flatnonzero(pi == 1.0))
    count = TERMS - len(certain)
    distribution = reference.cps_distribution(fit_cps(pi[free], count).coins, count)
    return {tuple(sorted(certain + tuple(free[list(s)]))): chance for s, chance in distribution.items()}


def reconstruction(sample, omega):
    u, v = factors()
    chosen = list(sample)
    return (u[:, chosen] * (SPECTRUM * omega)[chosen]) @ v[:, chosen].T


def test_unbiased_estimator_over_all_samples_satisfies_theorem_3_1():
    pi = optimal_inclusion(SPECTRUM, TERMS)
    distribution = sample_distribution(pi)
    u, v = factors()
    weight = (u * SPECTRUM) @ v.T
    mean = sum(chance * reconstruction(s, 1 / pi) for s, chance in distribution.items())
    np.testing.assert_allclose(mean, weight, rtol=0, atol=1e-11)
    error = sum(chance * np.sum((reconstruction(s, 1 / pi) - weight) ** 2) for s, chance in distribution.items())
    assert error == pytest.approx(np.sum(SPECTRUM**2 * (1 / pi - 1)), rel=1e-10)


@pytest.mark.parametrize("num_clients", [2, 3])
def test_collective_estimator_over_all_samples_satisfies_theorem_3_2(num_clients):
    pi, omega = collective_inclusion(SPECTRUM, TERMS, num_clients)
    distribution = sample_distribution(pi)
    u, v = factors()
    weight = (u * SPECTRUM) @ v.T

    def discrepancy(multipliers):
        part = {s: reconstruction(s, multipliers) for s in distribution}
        return sum(
            np.prod([distribution[s] for s in clients])
            * np.sum((sum(part[s] for s in clients) / num_clients - weight) ** 2)
            for clients in product(distribution, repeat=num_clients)
        )

    best = discrepancy(omega)
    expected = np.sum(SPECTRUM**2 * (1 - pi) / (1 + pi * (num_clients - 1)))
    assert best == pytest.approx(expected, rel=1e-10)
    for i in np.flatnonzero(pi > 0):
        for step in (-1e-3, 1e-3):
            assert discrepancy(omega + step * (np.arange(5) == i)) > best
