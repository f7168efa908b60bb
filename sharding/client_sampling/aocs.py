"""Optimal client sampling with sums only, so that secure aggregation hides every client's norm (AOCS).

The optimal probabilities need the norms sorted, which the server must not see. Instead, every client starts from the
probability that it would have without a cap, min(m·u/Σu, 1). The probability lost to the cap then goes to the clients
below 1 by a common factor C, a few times over. C needs two totals: the number of clients below 1, and the sum of their
probabilities. Each client computes the rest locally. The exact solution takes at most as many rescalings as there are
clients at 1; four come close in practice.
"""

from collections.abc import Callable

import numpy as np

from sharding.errors import UserError, safe_repr
from sharding.validation import Vector, as_floats, is_number

SecureSum = Callable[[Vector], float]  # from one number per client, (n,), to their total, all that the server may learn


def plain_sum(values: Vector) -> float:
    """Return the sum without protection, as a secure-aggregation protocol would return it."""
    return float(np.sum(values))


def aocs_probabilities(norms: Vector, budget: float, secure_sum: SecureSum, max_iterations: int = 4) -> Vector:
    """Approximate `optimal_inclusion(norms, budget)`; only `secure_sum` mixes clients.

    Everything else is elementwise: client i uses its own norm and the numbers that the server broadcasts. Clients of
    zero norm have p = 0 unless all others are at 1; then they share the rest. If all norms are zero, p = m/n.

    Args:
        norms: (n,) ‖w_i U_i‖, each known only to its client.
        budget: m, the expected number of uploads, in (0, n].
        secure_sum: a function from one number per client to their total.
        max_iterations: j_max, the most rescalings.

    Returns:
        (n,) probabilities, each known only to its client. Their sum is at most m, and m once no more hit the cap.

    Raises:
        UserError: budget out of range, or a norm is negative, NaN or infinite; whose norm it is stays hidden.

    Source: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723), Algorithm 2; C = 0/0 guarded.
    """
    u = as_floats(norms, "norms")
    if u.ndim != 1 or u.shape[0] == 0:
        raise UserError(f"norms has shape {u.shape}; a non-empty vector with one norm per client is needed")
    n = u.shape[0]
    if not (is_number(budget) and 0.0 < budget <= n):
        raise UserError(
            f"budget is {safe_repr(budget)}; a number above 0 and at most {n}, the number of clients, is needed"
        )
    if secure_sum(np.where(np.isfinite(u) & (u >= 0.0), 0.0, 1.0)) > 0:
        raise UserError("norms has entries that are NaN, infinite or negative; leave these clients out")
    total = secure_sum(u)
    p = np.minimum(budget * (u / total), 1.0) if total > 0.0 else 0.0 * u
    for _ in range(max_iterations):
        below = p < 1.0
        count, mass = secure_sum(np.where(below, 1.0, 0.0)), secure_sum(np.where(below, p, 0.0))
        if count == 0:
            break
        left = budget - (n - count)
        if mass == 0.0:  # only zero norms are below 1
            return np.where(below, left / count, p)
        factor = left / mass
        p = np.where(below, np.minimum(factor * p, 1.0), p)
        if factor <= 1.0:
            break
    return p
