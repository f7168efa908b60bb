"""Inclusion of least expected Schatten-p discrepancy for an unbiased estimate.

With ω = 1/π, the error of a term is λ(1/π − 1) when it is drawn and λ when it is not, so the expected p-th
power of the Schatten norm of the error is Σ λᵖ·f(π), f(π) = 1 − π + π(1/π − 1)ᵖ. In terms of the odds
*against* being drawn, x = (1 − π)/π, the derivative is a two-term polynomial: −f'(π) = 1 + p·x^(p−1) + (p −
1)·xᵖ. It increases with x, so f is convex, and the minimum under Σπ = n is where λᵖ·(−f') equals one
multiplier for all terms, or π = 1.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.errors import UserError
from sharding.validation import as_whole, nonnegative, positives_first


def schatten_inclusion(magnitudes: ArrayLike, num_terms: int, p: float = 4) -> NDArray[np.float64]:
    """Minimize Σ λᵖ·[1 − π + π(1/π − 1)ᵖ] subject to Σπ = num_terms, 0 ≤ π ≤ 1.

    Convex for every p > 1, so the one point where the KKT conditions hold is the minimum. At p = 2 the
    bracket is 1/π − 1 and this is `optimal_inclusion`. Bisection on the logarithm of the multiplier; zero
    magnitudes are drawn only when fewer than `num_terms` are positive, and then share the rest equally.

    Args:
        magnitudes: (N,) λ ≥ 0, in any order.
        num_terms: n, from 1 to N.
        p: the exponent of the norm, from 2 to 8.

    Returns:
        (N,) inclusion in the order of `magnitudes`.

    Raises:
        UserError: magnitudes negative or not finite, num_terms or p out of range.

    Source: Korzhenkov & Louizos 2024 (arXiv 2410.24106), the Schatten-p variant of Theorem 3.1.
    """
    scaled = nonnegative(magnitudes, "magnitudes")
    n = as_whole(num_terms, "num_terms", most=scaled.size)
    if not 2 <= p <= 8:
        raise UserError(f"p is {p}; a number from 2 to 8 is needed")
    inclusion = positives_first(scaled > 0.0, n)
    if inclusion is None:
        inclusion = np.zeros(scaled.size)
        positive = scaled > 0.0
        inclusion[positive] = _bisect(p * np.log(scaled[positive]), n, p)
    return inclusion


def _bisect(log_powers: NDArray[np.float64], n: int, p: float) -> NDArray[np.float64]:
    """π at the multiplier for which Σπ = n, given log λᵖ of more than n terms."""
    low, high = log_powers.min(), log_powers.max() + 1.0
    while _at_multiplier(log_powers, high, p).sum() > n:
        high += high - low + 1.0
    middle = 0.5 * (low + high)
    while low < middle < high:
        if _at_multiplier(log_powers, middle, p).sum() > n:
            low = middle
        else:
            high = middle
        middle = 0.5 * (low + high)
    # Where π leaves 1 its slope is infinite: between two neighboring floats it may still move.
    many, few = _at_multiplier(log_powers, low, p), _at_multiplier(log_powers, high, p)
    share = (n - few.sum()) / max(many.sum() - few.sum(), np.finfo(float).tiny)
    return few + share * (many - few)


def _at_multiplier(log_powers: NDArray[np.float64], log_multiplier: float, p: float) -> NDArray[np.float64]:
    """π = 1/(1 + x) with λᵖ(1 + p·x^(p−1) + (p − 1)·xᵖ) = multiplier, or 1 where λᵖ exceeds it."""
    excess = log_multiplier - log_powers
    inclusion = np.ones(log_powers.size)
    below = excess > 0.0
    # log(e^excess − 1), for small and for huge excess
    target = excess[below] + np.log(-np.expm1(-excess[below]))
    # u = log x. Either term alone bounds it from above; from there Newton's method descends monotonically.
    u = np.minimum((target - np.log(p)) / (p - 1.0), (target - np.log(p - 1.0)) / p)
    u = np.minimum(u, 700.0)  # π = 1e-304 is small enough
    for _ in range(6):  # log of the polynomial is nearly straight in log x: slope from p − 1 to p
        last = (p - 1.0) * np.exp(u)
        u -= ((p - 1.0) * u + np.log(p + last) - target) * (p + last) / ((p - 1.0) * p + p * last)
        u = np.minimum(u, 700.0)  # exp overflows from 710 on; there π is 0 to rounding
    inclusion[below] = 1.0 / (1.0 + np.exp(u))
    return inclusion
