"""Inclusion and multipliers for spread draws (the strategy *Coordinated*).

Where term i goes to Kᵢ of the C clients, Kᵢ being x = Cπᵢ rounded at random, E K² = x² + f(1 − f) with f the
fractional part of x: the variance is that of one coin, not of C. The discrepancy of the clients' average,
Σ λ²·E(1 − ωK/C)², is least at ω = C·E K/E K², where a term contributes λ²·f(1 − f)/(x² + f(1 − f)). That is λ²(1 − x)
up to x = 1, zero at every whole x ≥ 1, and positive between. So the best x are whole: each of the Cn largest terms
goes to exactly one client, and what is beyond them is lost. Where Cn exceeds N nothing is lost, however the Cn − N
further copies are given; they go where they most reduce the discrepancy of a single client's unbiased estimate,
Σ λ²(C/x − 1).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.inclusion.checks import client_count, nonnegative, term_count


def coordinated_inclusion(
    magnitudes: ArrayLike, num_terms: int, num_clients: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Minimize the discrepancy of the clients' average when their draws are spread, subject to Σπ = num_terms.

    Args:
        magnitudes: (N,) λ ≥ 0, in any order.
        num_terms: n, from 1 to N.
        num_clients: C ≥ 1, the clients of this keep ratio in this round.

    Returns:
        inclusion (N,), multiples of 1/C, and multipliers (N,), ω = 1/π (1 for terms that are never drawn).

    Raises:
        UserError: magnitudes negative or not finite, num_terms or num_clients out of range.

    Source: ours; the analogue of Theorem 3.2 of Korzhenkov & Louizos 2024 with E K² of the rounded count.
    """
    scaled = nonnegative(magnitudes, "magnitudes")
    n = term_count(num_terms, scaled.size)
    num_clients = client_count(num_clients)
    counts = _copies(scaled, n * num_clients, num_clients)
    inclusion = counts / num_clients
    return inclusion, spread_multipliers(inclusion, num_clients)


def spread_multipliers(inclusion: NDArray[np.float64], num_clients: int) -> NDArray[np.float64]:
    """Return the ω of least discrepancy for given π and spread draws, C·E K/E K²: (N,); 1 for terms never drawn."""
    x = num_clients * inclusion
    fraction = x - np.floor(x)
    return np.divide(num_clients * x, x**2 + fraction * (1 - fraction), out=np.ones_like(x), where=x > 0)


def _copies(magnitudes: NDArray[np.float64], total: int, most: int) -> NDArray[np.int64]:
    """Give out `total` copies, one to each of the largest terms first, none more than `most`."""
    size = magnitudes.size
    counts = np.zeros(size, dtype=np.int64)
    counts[np.argsort(-magnitudes, kind="stable")[:total]] = 1
    if total > size:
        x = np.arange(1, most)
        gains = np.square(magnitudes)[:, None] / (x * (x + 1.0))  # of the copy number x + 1; falls with x
        best = np.argsort(-gains, axis=None, kind="stable")[: total - size]
        counts += np.bincount(best // (most - 1), minlength=size)
    return counts
