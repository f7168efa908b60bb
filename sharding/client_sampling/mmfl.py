"""Optimal probabilities for several models, of which each client sends at most one update a round.

Client i works for model s with probability p_{s|i}, and Σ_s p_{s|i} ≤ 1. The best split of a client's total p_i is in
proportion to its norms; its share of the variance is then (Σ_s a_is)²/p_i. The optimal p_i are therefore those of one
model with norms M_i = Σ_s a_is.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.errors import UserError
from sharding.inclusion import optimal_inclusion
from sharding.validation import as_floats

Matrix = NDArray[np.float64]


def mmfl_probabilities(norms: ArrayLike, budget: float) -> Matrix:
    """Minimize Σ a²/p subject to Σ_s p_is ≤ 1 for every client and Σ p = budget.

    A client whose norms are all zero splits its probability evenly.

    Args:
        norms: (N, S) a_is = ‖d_is U_is‖, where d_is is client i's share of model s's data; or d_is times its loss.
        budget: m, the expected number of uploads over all models, in (0, N].

    Returns:
        (N, S) p_{s|i}, rows summing to at most 1.

    Raises:
        UserError: norms is not a matrix, or has negative or non-finite entries; or the budget is out of range.

    Source: Zhang et al. 2024, "Optimal Variance-Reduced Client Sampling for Multiple Models Federated Learning".
    """
    a = np.asarray(as_floats(norms, "norms"))
    if a.ndim != 2 or a.shape[1] == 0:
        raise UserError(f"norms has shape {a.shape}; one row a client and one column a model are needed")
    bad = np.argwhere(~(np.isfinite(a) & (a >= 0.0)))
    if len(bad):
        client, model = bad[0]
        raise UserError(f"norms[{client}, {model}] is {a[client, model]}; finite values of at least 0 are needed")
    scaled = a / (a.max(initial=0.0) or 1.0)
    totals = scaled.sum(axis=1)
    share = np.divide(scaled, totals[:, None], out=np.full(a.shape, 1.0 / a.shape[1]), where=totals[:, None] > 0)
    return optimal_inclusion(totals, budget)[:, None] * share
