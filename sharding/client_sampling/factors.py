"""The improvement factors of client sampling: how close a round of sampled uploads comes to full participation."""

import numpy as np
from numpy.typing import ArrayLike


def improvement_factors(norms: ArrayLike, probabilities: ArrayLike, budget: float) -> tuple[float, float]:
    """Return (α, γ) of one round.

    α = Σ u²(1/p − 1) / (n/m − 1)Σ u² is the variance of the draws relative to uniform draws of the same expected
    number: 0 is as good as full participation, 1 is no better than uniform. γ = m/(α(n − m) + m) is the share of full
    participation's step size that the convergence theory allows: m/n for uniform, 1 for full.

    Args:
        norms: (n,) u = ‖w U‖.
        probabilities: (n,) p; where p = 0, u must be 0.
        budget: m; with costs, Σp, the expected number of uploads.

    Source: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723), Eqs. 15 and 16.
    """
    u, p = np.asarray(norms, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    squares = u**2
    variance = squares * np.divide(1.0 - p, p, out=np.zeros_like(p), where=p > 0)
    return factors_of_sums(u.size, budget, float(squares.sum()), float(variance.sum()))


def factors_of_sums(num_clients: int, budget: float, squares: float, variance: float) -> tuple[float, float]:
    """Return (α, γ) from the sums n, m, Σu² and Σu²(1/p − 1)."""
    uniform = (num_clients / budget - 1.0) * squares
    alpha = variance / uniform if uniform > 0.0 else 0.0
    return alpha, budget / (alpha * (num_clients - budget) + budget)
