"""Slow, literal transcriptions of the client-sampling papers' formulas.

Sources: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723); Zhang et al. 2024; Luo et al. 2024 (arXiv 2404.13804);
Dabaja & El-Azouzi.
"""

import numpy as np


def ocs(norms, m):
    """Eq. 7 of Chen et al.: norms ascending, l the largest number with 0 < m + l − n ≤ Σ_{i≤l} u_(i) / u_(l)."""
    u = np.asarray(norms, dtype=float)
    order = np.argsort(u, kind="stable")
    n = len(u)
    p = np.ones(n)
    sizes = [
        number
        for number in range(1, n + 1)
        if m + number - n > 0 and (m + number - n) * u[order[number - 1]] <= sum(u[order[:number]]) * (1 + 1e-13)
    ]
    if sizes:
        number = max(sizes)
        for i in order[:number]:
            p[i] = (m + number - n) * u[i] / sum(u[order[:number]])
    return np.minimum(p, 1.0)


def aocs(norms, m, max_iterations):
    """Algorithm 2 of Chen et al., client by client."""
    n = len(norms)
    u = sum(norms)
    p = [min(m * norm / u, 1.0) for norm in norms]
    for _ in range(max_iterations):
        pairs = [(1, p_i) if p_i < 1 else (0, 0.0) for p_i in p]
        count, mass = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        if mass == 0:
            break
        factor = (m - n + count) / mass
        p = [min(factor * p_i, 1.0) if p_i < 1 else p_i for p_i in p]
        if factor <= 1:
            break
    return np.array(p)


def mmfl(norms, m):
    """Zhang et al.: with M_i = Σ_s a_is ascending, l the largest with 0 < m + l − N ≤ Σ_{i≤l} M_i / M_l."""
    a = np.asarray(norms, dtype=float)
    return ocs(a.sum(axis=1), m)[:, None] * a / a.sum(axis=1, keepdims=True)


def wireless_objective(q, a, c, ratio, cohort_size):
    """P3 of Luo et al.: expected round time times the bound's number of rounds, over α/ε."""
    return (q @ c) * (np.sum(a**2 / q) / cohort_size + ratio)
