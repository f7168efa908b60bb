"""Probabilities of draws that reach the wanted loss in the least time, and of draws that need the fewest rounds.

K clients are drawn with replacement by q. The number of rounds is proportional to Σ p²G²/(K q) + β/α (the convergence
bound), and a round takes about Σ q c seconds. Problem P3 minimizes their product. It is not convex, and the paper
searches over M = Σ q c with a convex problem (P4) at every step. But all stationary points have the form

    q_i ∝ a_i/√(c_i − x),  a = p·G,

and multiplying the stationarity condition by q and summing leaves one equation for x:

    x·(Σ_i a_i/√(c_i − x))² = K·β/α.

Its left side rises from 0 at x = 0 to ∞ at x = min c, so there is one stationary point. On the simplex' border the
product is infinite, so this point is the global minimum, which one monotone root search finds exactly. β/α = 0 gives
x = 0, q ∝ pG/√c (Eq. 38); a large β/α favors the fastest clients; x → −∞ would ignore time.
"""

import logging

import numpy as np
from numpy.typing import ArrayLike

from sharding.errors import UserError, safe_repr
from sharding.validation import Vector, as_alike, as_amounts, as_floats, as_whole, is_number

log = logging.getLogger(__name__)

MOST = 1e150  # of K·β/α over the square of the largest pG, as good as infinite; its square is finite


def wireless_probabilities(
    weights: ArrayLike, gradient_norms: ArrayLike, times: ArrayLike, beta_over_alpha: float, cohort_size: int
) -> Vector:
    """Minimize (Σ q c)·(Σ p²G²/(K q) + β/α) over probability vectors q, globally, in O(N) a step of a root search.

    The bound has α/K, where α does not include the cohort's size. If a source's α includes 1/K, pass cohort_size=1.

    Args:
        weights: (N,) p ≥ 0, the clients' shares of the data; any scale.
        gradient_norms: (N,) G ≥ 0; clients with pG = 0 are never drawn.
        times: (N,) c > 0 in seconds: K t/f_tot + τ.
        beta_over_alpha: β/α ≥ 0 of the convergence bound, in the units of (pG)² with Σp = 1.
        cohort_size: K ≥ 1 draws a round.

    Returns:
        (N,) q, summing to 1; uniform if every pG is 0.

    Raises:
        UserError: lengths differ, a value is negative or not finite, a time is 0, or K or β/α is out of range.

    Source: Luo et al. 2024 (arXiv 2404.13804), problems P3 and P4, Eq. 36 and Eq. 38; the closed form is ours.
    """
    p, g, c = as_amounts(weights, "weights"), as_amounts(gradient_norms, "gradient_norms"), as_amounts(times, "times")
    if not p.size == g.size == c.size > 0:
        raise UserError(
            f"weights, gradient_norms and times have {p.size}, {g.size} and {c.size} entries, not one per client"
        )
    if not c.min() > 0.0:
        raise UserError(f"times[{int(c.argmin())}] is {c.min()}; times above 0 seconds are needed")
    as_whole(cohort_size, "cohort_size")
    if not (is_number(beta_over_alpha) and beta_over_alpha >= 0.0):
        raise UserError(f"beta_over_alpha is {safe_repr(beta_over_alpha)}; a finite number of at least 0 is needed")
    a = p / (p.sum() or 1.0) * g
    scale = a.max()
    if scale == 0.0:
        return np.full(a.size, 1.0 / a.size)
    a /= scale
    drawn = a > 0.0
    q = np.zeros(a.size)
    fastest = float(c[drawn].min())
    slack = c[drawn] - fastest
    square = max(float(scale**2), float(np.finfo(np.float64).tiny))  # a tiny G squares to 0
    balance = min(cohort_size * beta_over_alpha / square, MOST)
    q[drawn] = a[drawn] / np.sqrt(slack + _gap(a[drawn], slack, fastest, balance))
    return q / q.sum()


def statistical_probabilities(weights: ArrayLike, gradient_norms: ArrayLike) -> Vector:
    """Return q ∝ pG, (N,), which needs the fewest rounds and ignores their time."""
    p, g = as_alike(weights=weights, gradient_norms=gradient_norms)
    a = p * g
    return a / a.sum() if a.sum() > 0.0 else np.full(a.size, 1.0 / a.size)


def estimate_beta_over_alpha(
    weights: ArrayLike,
    gradient_norms: ArrayLike,
    rounds_uniform: ArrayLike,
    rounds_weighted: ArrayLike,
    cohort_size: int,
) -> tuple[float, Vector]:
    """Estimate β/α from the rounds that two pilots took to the same losses; use means of several runs as pilots.

    By the bound R_uniform/R_weighted = (N Σp²G²/K + β/α)/(Σ pG²/K + β/α) for every loss, between 1 and the ratio at
    β = 0. If the pilots contradict the bound at all losses, the estimate is 0, which gives the probabilities of Eq. 38,
    and a warning is logged.

    Args:
        weights: (N,) p, summing to 1.
        gradient_norms: (N,) G.
        rounds_uniform: (L,) rounds that uniform sampling took to each of L losses.
        rounds_weighted: (L,) rounds that weighted sampling (q = p) took.
        cohort_size: K of the pilot runs.

    Returns:
        The mean of the estimates by loss, and these, (L,), NaN where the pilots contradict the bound.

    Raises:
        UserError: p or G is negative or not finite, or lengths differ.

    Source: Luo et al. 2024, Eq. 35 and Section 5.3.1.
    """
    p, g = as_alike(weights=weights, gradient_norms=gradient_norms)
    of_uniform, of_weighted = as_floats(rounds_uniform, "rounds_uniform"), as_floats(rounds_weighted, "rounds_weighted")
    if of_uniform.shape != of_weighted.shape:
        raise UserError(
            f"rounds_uniform has {of_uniform.size} entries and rounds_weighted has {of_weighted.size}; one of each per "
            "loss is needed"
        )
    ratio = np.asarray(of_uniform / of_weighted)
    uniform, weighted = p.size * float(p**2 @ g**2), float(p @ g**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = (uniform - ratio * weighted) / (cohort_size * (ratio - 1.0))
    each = np.where(np.isfinite(each) & (each >= 0.0), each, np.nan)
    if np.isnan(each).all():
        log.warning("the pilots' rounds contradict the bound at every loss; using β/α = 0")
        return 0.0, each
    return float(np.nanmean(each)), each


def _gap(a: Vector, slack: Vector, fastest: float, target: float) -> float:
    """Return min c − x where x·(Σ a/√(slack + gap))² = target, in (0, min c]."""
    if target == 0.0:
        return fastest
    # The root is explicit with Σa, or with only the fastest client's a, at the fastest client's time: a bracket.
    alone = float(a[slack == 0.0].max()) ** 2
    together = float(a.sum()) ** 2
    low, high = (np.log(fastest * mass / (mass + target)) for mass in (alone, together))
    y = 0.5 * (low + high)
    for _ in range(200):
        gap = float(np.exp(y))
        inverse = 1.0 / (slack + gap)
        terms = a * np.sqrt(inverse)
        z, x = float(terms.sum()), fastest - gap
        excess = np.log(max(x, np.finfo(float).tiny)) + 2.0 * np.log(z) - np.log(target)  # falls with y
        low, high = (y, high) if excess > 0.0 else (low, y)
        slope = -gap / max(x, np.finfo(float).tiny) - gap * float(terms @ inverse) / z
        step = -excess / slope
        if abs(step) <= 1e-15 * max(1.0, abs(y)) or high - low <= 1e-15 * max(1.0, abs(y)):
            break
        y = y + step if low < y + step < high else 0.5 * (low + high)
    return float(np.exp(y))
