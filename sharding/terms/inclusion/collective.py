"""Inclusion and multipliers that are optimal for the average of all clients (the strategy *Collective*).

The server averages a vector over the clients that drew it. With C clients and the multiplier at its
optimum, ω = C/(1 + π(C − 1)), the discrepancy of that average is convex in π, and at its minimum π is the
magnitude on a straight line, cut off at both ends: πᵢ = clip((λᵢ·s − 1)/(C − 1), 0, 1). Small terms are
never drawn, large ones always. The sum of π is piecewise linear in s, so the one s with Σπ = n is found
exactly between two breakpoints.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.validation import as_whole, nonnegative, positives_first


def collective_inclusion(
    magnitudes: ArrayLike, num_terms: int, num_clients: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Minimize the discrepancy of the averaged reconstruction subject to Σπ = num_terms, in O(N log N).

    One client gets the `num_terms` largest terms (the first ones among ties). Zero magnitudes are drawn
    only when fewer than `num_terms` are positive; they then share the rest equally.

    Args:
        magnitudes: (N,) λ ≥ 0, in any order.
        num_terms: n, from 1 to N.
        num_clients: C ≥ 1, the clients of this keep ratio in this round.

    Returns:
        inclusion (N,) and multipliers (N,), ω = C/(1 + π(C − 1)), in the order of `magnitudes`.

    Raises:
        UserError: magnitudes negative or not finite, num_terms or num_clients out of range.

    Source: Korzhenkov & Louizos 2024 (arXiv 2410.24106), Theorem 3.2 and Algorithm 2.
    """
    scaled = nonnegative(magnitudes, "magnitudes")
    n = as_whole(num_terms, "num_terms", most=scaled.size)
    num_clients = as_whole(num_clients, "num_clients")
    inclusion = positives_first(scaled > 0.0, n)
    if inclusion is None:
        order = np.argsort(-scaled, kind="stable")
        inclusion = np.zeros(scaled.size)
        if num_clients == 1:
            inclusion[order[:n]] = 1.0
        else:
            inclusion[order] = _clipped_line(scaled[order], n, num_clients)
    return inclusion, num_clients / (1.0 + inclusion * (num_clients - 1.0))


def _clipped_line(magnitudes: NDArray[np.float64], n: int, num_clients: int) -> NDArray[np.float64]:
    """π for C ≥ 2 and magnitudes in non-increasing order, more than n of them positive."""
    rise = num_clients - 1.0
    with np.errstate(divide="ignore", over="ignore"):
        enters, saturates = 1.0 / magnitudes, num_clients / magnitudes  # values of s; both non-decreasing
    tail = np.append(np.cumsum(magnitudes[::-1])[::-1], 0.0)  # summed from the small end: no cancellation
    breakpoints = np.sort(np.concatenate([enters, saturates]))
    breakpoints = breakpoints[np.isfinite(breakpoints)]
    full = np.searchsorted(saturates, breakpoints, side="right")
    above = np.searchsorted(enters, breakpoints, side="right")
    total = full + (breakpoints * (tail[full] - tail[above]) - (above - full)) / rise
    end = min(int(np.searchsorted(total, n)), breakpoints.size - 1)  # Σπ reaches n at or before this breakpoint
    start = max(end - 1, 0)
    ones, some = int(full[start]), int(above[start])
    inclusion = np.zeros(magnitudes.size)
    inclusion[:ones] = 1.0
    if some > ones:
        between = magnitudes[ones:some]
        s = ((n - ones) * rise + between.size) / float(between.sum())
        inclusion[ones:some] = np.clip((between * s - 1.0) / rise, 0.0, 1.0)
    return inclusion
