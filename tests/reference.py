"""Slow, literal transcriptions of the papers' algorithms and definitions, for small N.

A *distribution* is a dictionary from the sample, a sorted tuple of indices, to its probability.

Sources: Korzhenkov & Louizos, NeurIPS 2024 (arXiv 2410.24106); Tillé, *Sampling Algorithms*, Springer 2006;
Chen, Dempster & Liu, Biometrika 1994; Brewer 1975.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import combinations
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

Distribution = dict[tuple[int, ...], float]
Floats = NDArray[np.float64]


def inclusion_of(distribution: Mapping[tuple[int, ...], float], size: int) -> Floats:
    """First-order inclusion probabilities of a distribution, (N,)."""
    inclusion = np.zeros(size)
    for chosen, chance in distribution.items():
        inclusion[list(chosen)] += chance
    return inclusion


def joint_of(distribution: Mapping[tuple[int, ...], float], size: int) -> Floats:
    """Joint inclusion probabilities of a distribution, (N, N), the first-order ones on the diagonal."""
    joint = np.zeros((size, size))
    for chosen, chance in distribution.items():
        joint[np.ix_(chosen, chosen)] += chance
    return joint


def unbiased_inclusion(magnitudes: ArrayLike, num_terms: int) -> Floats:
    """Algorithm 1 of Korzhenkov & Louizos in exact fractions: sweep over t, the number of terms at 1, and keep the
    feasible one with the least criterion Σλ²(1/π − 1); 0 < n < N, all λ > 0.
    """
    lam = sorted(map(Fraction, np.asarray(magnitudes, dtype=float).tolist()), reverse=True)
    n, best, best_pi = num_terms, None, []
    for t in range(n):
        total = sum(lam[t:])
        if lam[t] < total / (n - t):
            pi = [Fraction(1)] * t + [(n - t) * value / total for value in lam[t:]]
            criterion = sum(value**2 * (1 / p - 1) for value, p in zip(lam, pi, strict=True))
            if best is None or criterion < best:
                best, best_pi = criterion, pi
    assert best is not None
    return _in_the_order_of(magnitudes, best_pi)


def collective_inclusion(magnitudes: ArrayLike, num_terms: int, num_clients: int) -> Floats:
    """Algorithm 2 of Korzhenkov & Louizos in exact fractions: sweep over t, the number of terms at 1, and u, the
    number between 0 and 1; start from the n largest; 0 < n < N, all λ > 0, C ≥ 2.

    The paper's √β appears only over or times √C, so b = √β/√C is a fraction.
    """
    lam = sorted(map(Fraction, np.asarray(magnitudes, dtype=float).tolist()), reverse=True)
    size, n, C = len(lam), num_terms, num_clients
    best_pi = [Fraction(1)] * n + [Fraction(0)] * (size - n)
    best = -sum(value**2 for value in lam[:n])
    for t in range(n):
        for u in range(1, size - t + 1):
            middle = lam[t : t + u]
            b = sum(middle) / ((n - t) * (C - 1) + u)
            if lam[t] / C < b and (t == 0 or b <= lam[t - 1] / C) and b < middle[-1]:
                pi = [(value / b - 1) / (C - 1) for value in middle]
                gain = Fraction(C, C - 1) * sum(value * (value - b) for value in middle)
                criterion = -sum(value**2 for value in lam[:t]) - gain
                if criterion < best:
                    best = criterion
                    best_pi = [Fraction(1)] * t + pi + [Fraction(0)] * (size - t - u)
    return _in_the_order_of(magnitudes, best_pi)


def _in_the_order_of(magnitudes: ArrayLike, descending: list[Fraction]) -> Floats:
    """Give values that belong to descending magnitudes back in the order of these."""
    result = np.empty(len(descending))
    result[np.argsort(-np.asarray(magnitudes, dtype=float), kind="stable")] = [float(value) for value in descending]
    return result


def distribution_by_steps(size: int, num_terms: int, weigh: Callable[[tuple[int, ...], int], float]) -> Distribution:
    """Enumerate all orders: each next item i in proportion to weigh(those drawn before, i)."""
    distribution: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(drawn: tuple[int, ...], chance: float) -> None:
        if len(drawn) == num_terms:
            distribution[tuple(sorted(drawn))] += chance
            return
        weights = {i: weigh(drawn, i) for i in range(size) if i not in drawn}
        total = sum(sorted(weights.values()))
        for i, weight in weights.items():
            extend((*drawn, i), chance * weight / total)

    extend((), 1.0)
    return dict(distribution)


def successive_distribution(weights: Iterable[float], num_terms: int) -> Distribution:
    """Each next item in proportion to the remaining weights."""
    weights = tuple(float(w) for w in weights)
    return distribution_by_steps(len(weights), num_terms, lambda drawn, i: weights[i])


def cps_distribution(coins: Iterable[float], num_terms: int) -> Distribution:
    """Conditional Poisson sampling (Chen, Dempster & Liu 1994): coins given that `num_terms` of them show heads."""
    coins = tuple(float(p) for p in coins)
    weight = {
        s: prod(p if i in s else 1.0 - p for i, p in enumerate(coins))
        for s in combinations(range(len(coins)), num_terms)
    }
    total = sum(weight.values())
    return {s: w / total for s, w in weight.items()}


def brewer_distribution(inclusion: Iterable[float]) -> Distribution:
    """Brewer's method (Tillé 2006, Algorithm 6.10): step k draws j with chance ∝ π(A − π)/(A − (n − k + 1)π)."""
    pi = tuple(float(p) for p in inclusion)
    n = round(sum(pi))

    def weigh(drawn: tuple[int, ...], j: int) -> float:
        a, left = n - sum(pi[i] for i in drawn), n - len(drawn)
        return pi[j] * (a - pi[j]) / (a - left * pi[j]) if left > 1 else pi[j]

    return distribution_by_steps(len(pi), n, weigh)
