"""Slow, literal transcriptions of the client-sampling papers' formulas, and their problems for a convex solver.

Sources: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723); Zhang et al. 2024; Luo et al. 2024 (arXiv 2404.13804);
Dabaja & El-Azouzi.
"""

import warnings

import numpy as np

TIGHT = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}


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


def solve(problem):
    """Solve as tightly as the solver can; the tests judge how tightly that was."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        problem.solve("CLARABEL", **TIGHT)


def solve_inclusion(a, m, costs):
    """Minimize Σ a²/p, Σ c·p = m, 0 ≤ p ≤ 1, by a convex solver; made exactly feasible."""
    import cvxpy as cp  # which takes a second

    p = cp.Variable(len(a))
    goal = cp.Minimize(cp.sum(cp.multiply(a**2, cp.inv_pos(p))))
    solve(cp.Problem(goal, [costs @ p <= m, p <= 1]))
    value = np.clip(p.value, 0, 1)
    return value * min(1.0, m / (costs @ value))


def solve_mmfl(a, m):
    """Minimize Σ a²/p, Σ p = m, Σ_s p_is ≤ 1, by a convex solver; made exactly feasible."""
    import cvxpy as cp

    p = cp.Variable(a.shape)
    goal = cp.Minimize(cp.sum(cp.multiply(a**2, cp.inv_pos(p))))
    solve(cp.Problem(goal, [cp.sum(p) <= m, cp.sum(p, axis=1) <= 1]))
    value = np.maximum(p.value, 0)
    value /= np.maximum(value.sum(axis=1, keepdims=True), 1.0)
    return value * min(1.0, m / value.sum())


def wireless_objective(q, a, c, ratio, cohort_size):
    """P3 of Luo et al.: expected round time times the bound's number of rounds, over α/ε."""
    return (q @ c) * (np.sum(a**2 / q) / cohort_size + ratio)
