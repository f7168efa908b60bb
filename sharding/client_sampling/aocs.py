"""Optimal client sampling through sums alone, so that secure aggregation hides every client's norm (AOCS).

The optimal probabilities need the norms sorted, which the server must not see. Instead, every client starts from the
probability it would have if none were capped, min(m·u/Σu, 1). The probability lost to the cap is then given to those
below 1 by a common factor C, a few times over. C takes two totals: how many clients are below 1, and the sum of their
probabilities. Each client does the rest for itself. The exact solution is reached after at most as many rescalings as
there are different clients at 1, and in practice nearly so after four.
"""

from collections.abc import Callable, Generator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from sharding.errors import UserError, shown
from sharding.validation import as_floats, is_number

Vector = NDArray[np.float64]
Totals = tuple[float, float]  # of an exchange: each client sends two numbers at once
SecureSum = Callable[[Vector], float]  # one number per client, (n,), to their total: all that the server may learn


def plain_sum(values: Vector) -> float:
    """Add up in the clear: what a secure-aggregation protocol returns, without its protection."""
    return float(np.sum(values))


def aocs_probabilities(norms: Vector, budget: float, secure_sum: SecureSum, max_iterations: int = 4) -> Vector:
    """Approximate `optimal_inclusion(norms, budget)`; whatever mixes clients goes through `secure_sum`.

    Everything else is elementwise: what client i does with its own norm and the numbers the server broadcasts. Clients
    of zero norm have p = 0 unless all others are at 1; they then share what is left. All-zero norms give p = m/n.

    Args:
        norms: (n,) ‖w_i U_i‖, each known to its client only.
        budget: m, the expected number of uploads, in (0, n].
        secure_sum: from one number per client to their total.
        max_iterations: j_max, the most rescalings.

    Returns:
        (n,) probabilities, each known to its client only; their sum is at most m, and m once no more hit the cap.

    Raises:
        UserError: budget out of range, or norms that are negative, NaN or infinite (which of them stays hidden).

    Source: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723), Algorithm 2; C = 0/0 guarded.
    """
    u = as_floats(norms, "norms")
    if u.ndim != 1 or u.shape[0] == 0:
        raise UserError(f"norms has shape {u.shape}; a non-empty vector, one norm a client, is needed")
    n = u.shape[0]
    if not (is_number(budget) and 0.0 < budget <= n):
        raise UserError(
            f"budget is {shown(budget)}; a number above 0 and at most {n}, the clients there are, is needed"
        )
    totals: list[Totals] = []
    while isinstance(part := aocs_part(u, budget, n, totals, max_iterations), tuple):
        totals.append((secure_sum(part[0]), secure_sum(part[1])))
    return part


def aocs_part(
    norms: Vector, budget: float, num_clients: int, totals: Sequence[Totals], max_iterations: int = 4
) -> Vector | tuple[Vector, Vector]:
    """Do what a client does in `aocs_probabilities`, as far as the totals go that the server has sent so far.

    It starts from the beginning each time, so that a client has to remember nothing but its norm.

    Args:
        norms: ‖w_i U_i‖ of the clients whose part this is: of all, or of a single one, shape (1,). The server has
            those of none, (0,), and learns how many totals it takes.
        budget: m.
        num_clients: n, all of them.
        totals: each exchange's, in their order.
        max_iterations: j_max.

    Returns:
        Their probabilities, or, where another exchange is needed, their two numbers that go into its totals.

    Raises:
        UserError: somebody's norm is negative, NaN or infinite, as the totals say.
    """
    steps, given = _exchanges(norms, budget, num_clients, max_iterations), iter(totals)
    try:
        summands = next(steps)
        for total in given:
            summands = steps.send(total)
        return summands
    except StopIteration as end:
        return cast(Vector, end.value)


def _exchanges(
    u: Vector, budget: float, n: int, max_iterations: int
) -> Generator[tuple[Vector, Vector], Totals, Vector]:
    """Yield what is to be summed, be sent the totals, and return p."""
    bad, total = yield np.where(np.isfinite(u) & (u >= 0.0), 0.0, 1.0), u
    if bad > 0:
        raise UserError("norms has entries that are NaN, infinite or negative; leave those clients out")
    p = np.minimum(budget * (u / total), 1.0) if total > 0.0 else 0.0 * u
    for _ in range(max_iterations):
        below = p < 1.0
        count, mass = yield np.where(below, 1.0, 0.0), np.where(below, p, 0.0)
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
