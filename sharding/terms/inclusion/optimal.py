"""Inclusion of least variance for an unbiased estimate (the strategy *Unbiased*, and optimal client sampling).

Estimate Σ xᵢ by Σ_{i drawn} xᵢ/pᵢ, |xᵢ| = aᵢ. Its expected squared error is Σ aᵢ²(1/pᵢ − 1). Under a budget
Σ cᵢpᵢ = m the best pᵢ are proportional to aᵢ/√cᵢ, except that none may exceed 1: terms that would are always
drawn, and the others share the rest of the budget.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.errors import UserError, safe_repr
from sharding.validation import as_floats, is_number, nonnegative


def optimal_inclusion(magnitudes: ArrayLike, budget: float, costs: ArrayLike | None = None) -> NDArray[np.float64]:
    """Minimize Σ a²/p subject to Σ c·p = budget, 0 ≤ p ≤ 1, in O(N log N).

    With a/√c in non-increasing order and the first t at 1, p_i = (m − Σ_{j≤t} c_j)·(a_i/√c_i) / Σ_{j>t}
    √c_j·a_j; t is the smallest number for which every p ≤ 1. Zero magnitudes are drawn only when budget
    remains after all positive ones are at 1; they then share it equally. When all are zero, p is uniform.

    Args:
        magnitudes: (N,) a ≥ 0, in any order: singular values, or norms of client updates.
        budget: m, the expected cost of a draw, in (0, Σc]; the number of terms when costs are 1. Need not
            be whole.
        costs: (N,) c > 0; 1 by default.

    Returns:
        (N,) inclusion in the order of `magnitudes`.

    Raises:
        UserError: magnitudes or costs negative or not finite, a cost of 0, or a budget out of range.

    Source: Korzhenkov & Louizos 2024 (arXiv 2410.24106), Theorem 3.1 and Algorithm 1; with costs, the KKT
    conditions of the partial-training form of optimal client sampling.
    """
    a = nonnegative(magnitudes, "magnitudes")
    c = _valid_costs(costs, a.size)
    total = float(c.sum())
    if not (is_number(budget) and 0.0 < budget <= total * (1.0 + 1e-12)):
        raise UserError(
            f"budget is {safe_repr(budget)}; a number above 0 and at most {total:g}, the cost of all, is needed"
        )
    if budget >= total:
        return np.ones(a.size)  # exactly, which the closed form's rounding would not give
    ratio = a / np.sqrt(c)
    order = np.argsort(-ratio)  # the order among ties does not matter: all of them get the same p
    ratio, sorted_c = ratio[order], c[order]
    left = budget - np.concatenate([[0.0], np.cumsum(sorted_c)[:-1]])  # when the t first are at 1
    tail = np.cumsum((sorted_c * ratio)[::-1])[::-1]  # Σ_{j>t} √c·a, summed from the small end
    fits = (ratio * left <= tail) & (tail > 0.0)
    t = int(np.argmax(fits)) if fits.any() else int(np.count_nonzero(ratio))
    inclusion = np.ones(a.size)
    if fits.any():
        inclusion[order[t:]] = np.minimum(1.0, ratio[t:] * (left[t] / tail[t]))
    elif t < a.size:
        inclusion[order[t:]] = min(1.0, left[t] / float(sorted_c[t:].sum()))
    return inclusion


def _valid_costs(costs: ArrayLike | None, size: int) -> NDArray[np.float64]:
    if costs is None:
        return np.ones(size)
    c = np.asarray(as_floats(costs, "costs"))
    if c.shape != (size,) or not np.all(np.isfinite(c) & (c > 0.0)):
        raise UserError(f"costs must be {size} finite numbers above 0, one for each magnitude; got {safe_repr(c)}")
    return c
