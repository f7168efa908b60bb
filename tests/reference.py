"""Slow, literal transcriptions of the papers' algorithms and definitions, for small N.

A *law* is a dictionary from the sample, a sorted tuple of indices, to its probability.

Sources: Korzhenkov & Louizos, NeurIPS 2024 (arXiv 2410.24106); Tillé, *Sampling Algorithms*, Springer 2006;
Chen, Dempster & Liu, Biometrika 1994; Sampford, Biometrika 1967; Brewer 1975.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations, product
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

Law = dict[tuple[int, ...], float]
Floats = NDArray[np.float64]


def inclusion_of(law: Mapping[tuple[int, ...], float], size: int) -> Floats:
    """First-order inclusion probabilities of a law, (N,)."""
    inclusion = np.zeros(size)
    for chosen, chance in law.items():
        inclusion[list(chosen)] += chance
    return inclusion


def joint_of(law: Mapping[tuple[int, ...], float], size: int) -> Floats:
    """Joint inclusion probabilities of a law, (N, N), the first-order ones on the diagonal."""
    joint = np.zeros((size, size))
    for chosen, chance in law.items():
        joint[np.ix_(chosen, chosen)] += chance
    return joint


def unbiased_inclusion(magnitudes: ArrayLike, num_terms: int) -> Floats:
    """Algorithm 1 of Korzhenkov & Louizos: raise t, the number of terms at 1, until every π is at most 1."""
    lam = np.asarray(magnitudes, dtype=float)
    order = np.argsort(-lam, kind="stable")
    for t in range(num_terms + 1):
        pi = np.ones(lam.size)
        rest = order[t:]
        if num_terms > t:
            pi[rest] = (num_terms - t) * lam[rest] / sum(lam[rest])
        else:
            pi[rest] = 0.0
        if all(pi <= 1.0 + 1e-12):
            return np.minimum(pi, 1.0)
    raise AssertionError("no number of terms at 1 is feasible")


def collective_inclusion(magnitudes: ArrayLike, num_terms: int, num_clients: int) -> Floats:
    """Algorithm 2 of Korzhenkov & Louizos: try every number of terms at 1 and at 0, and solve the KKT
    system of each.

    Between them 1 + π(C − 1) = s·λ; the split is right when those π lie in [0, 1], the terms at 1 would be at
    least 1 and the terms at 0 at most 0.
    """
    lam = np.asarray(magnitudes, dtype=float)
    order = np.argsort(-lam, kind="stable")
    size, rise, slack = lam.size, num_clients - 1, 1e-11
    for ones in range(num_terms + 1):
        for zeros in range(size - num_terms + 1):
            top, middle, bottom = order[:ones], order[ones : size - zeros], order[size - zeros :]
            if middle.size:
                scales = [((num_terms - ones) * rise + middle.size) / sum(lam[middle])]
            elif ones == num_terms:
                scales = [num_clients / lam[top[-1]]]
            else:
                continue
            for s in scales:
                line = (lam * s - 1.0) / rise
                inside = all(line[middle] >= -slack) and all(line[middle] <= 1.0 + slack)
                if inside and all(line[top] >= 1.0 - slack) and all(line[bottom] <= slack):
                    pi = np.zeros(size)
                    pi[top], pi[middle] = 1.0, np.clip(line[middle], 0.0, 1.0)
                    return pi
    raise AssertionError("no split satisfies the KKT conditions")


def successive_law(weights: Iterable[float], num_terms: int) -> Law:
    """Enumerate all orders: each next item in proportion to the remaining weights."""
    weights = tuple(float(w) for w in weights)
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(chosen: tuple[int, ...], chance: float) -> None:
        if len(chosen) == num_terms:
            law[tuple(sorted(chosen))] += chance
            return
        rest = [i for i in range(len(weights)) if i not in chosen]
        total = sum(sorted(weights[i] for i in rest))
        for i in rest:
            extend((*chosen, i), chance * weights[i] / total)

    extend((), 1.0)
    return dict(law)


def numpy_choice(rng: np.random.RandomState | np.random.Generator, size: int, weights: Floats) -> list[int]:
    """numpy's `choice(N, size, replace=False, p=weights)`: draw with replacement, drop what was had,
    repeat.
    """
    found: list[int] = []
    while len(found) < size:
        uniforms = rng.random(size - len(found))
        remaining = weights.copy()
        remaining[found] = 0.0
        cdf = np.cumsum(remaining)
        cdf /= cdf[-1]
        found = list(dict.fromkeys([*found, *cdf.searchsorted(uniforms, side="right").tolist()]))
    return found


def numpy_choice_law(weights: Iterable[float], num_terms: int) -> Law:
    """The exact law of `numpy_choice`: every outcome of every batch, with its chance."""
    weights = np.array(list(weights), dtype=float)
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(found: tuple[int, ...], chance: float) -> None:
        if len(found) == num_terms:
            law[tuple(sorted(found))] += chance
            return
        rest = [i for i in range(weights.size) if i not in found]
        p = {i: weights[i] / weights[rest].sum() for i in rest}
        for batch in product(rest, repeat=num_terms - len(found)):
            extend(tuple(dict.fromkeys((*found, *batch))), chance * prod(p[i] for i in batch))

    extend((), 1.0)
    return dict(law)


def cps_law(coins: Iterable[float], num_terms: int) -> Law:
    """Conditional Poisson sampling (Chen, Dempster & Liu 1994): coins given that `num_terms` of them show
    heads.
    """
    coins = tuple(float(p) for p in coins)
    weight = {
        s: prod(p if i in s else 1.0 - p for i, p in enumerate(coins))
        for s in combinations(range(len(coins)), num_terms)
    }
    total = sum(weight.values())
    return {s: w / total for s, w in weight.items()}


def sampford_law(inclusion: Iterable[float]) -> Law:
    """Sampford's design (Tillé 2006, Section 5.6): chances ∝ Π_{i∈s} π/(1 − π) · Σ_{k∈s} (1 − π)."""
    pi = tuple(float(p) for p in inclusion)
    weight = {
        s: prod(pi[i] / (1.0 - pi[i]) for i in s) * sum(1.0 - pi[i] for i in s)
        for s in combinations(range(len(pi)), round(sum(pi)))
    }
    total = sum(weight.values())
    return {s: w / total for s, w in weight.items()}


def brewer_law(inclusion: Iterable[float]) -> Law:
    """Brewer's method (Tillé 2006, Algorithm 6.10): step k draws j with chance ∝ π(A − π)/(A − (n − k +
    1)π).
    """
    pi = tuple(float(p) for p in inclusion)
    n = round(sum(pi))
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(drawn: tuple[int, ...], chance: float) -> None:
        if len(drawn) == n:
            law[tuple(sorted(drawn))] += chance
            return
        a = n - sum(pi[i] for i in drawn)
        left = n - len(drawn)
        weight = {
            j: pi[j] * (a - pi[j]) / (a - left * pi[j]) if left > 1 else pi[j] for j in range(len(pi)) if j not in drawn
        }
        for j, w in weight.items():
            extend((*drawn, j), chance * w / sum(weight.values()))

    extend((), 1.0)
    return dict(law)
