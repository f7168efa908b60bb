"""Conditional Poisson sampling (CPS): the design of maximum entropy for its π.

Flip an independent coin for every term and keep the outcome if exactly k came up. Conditioning shifts the
chances, so the coins' log-odds η are fitted until the *conditional* inclusion equals π:

    logit πᵢ(η) = ηᵢ + log Pr(k − 1 of the others) − log Pr(k of the others).

Both chances come from `poisson_binomial`, for all i at once. Since ∂ logit πᵢ/∂ηⱼ is close to that of Hájek's
approximation, a diagonal minus a rank-one matrix, each step divides the misfit in log-odds by that
diagonal; five or so reach 1e-13.
"""

from dataclasses import dataclass

import numpy as np

from sharding.terms.designs.design import Floats, Indices
from sharding.terms.inclusion import poisson_binomial as pb

ENTRIES = 1 << 18  # coins flipped at once, at most
TOLERANCE = 1e-13
ACCEPTABLE = 1e-10  # should rounding ever keep the fit from its tolerance
ROUNDING = 1e-17  # a chance below it is noise


@dataclass(frozen=True)
class ConditionalPoisson:
    """Fitted coins: `coins` (N,) with Σ = count, and the chance `hit` that exactly `count` show heads."""

    coins: Floats
    count: int
    hit: float

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) ascending positions: all coins are flipped until `count` of them show heads."""
        kept: list[Indices] = []
        missing, tries = size, 1.0 / self.hit
        while missing > 0:
            rows = max(1, min(int(np.ceil(missing * tries)), ENTRIES // self.coins.size))
            heads = rng.random((rows, self.coins.size)) < self.coins
            heads = heads[np.count_nonzero(heads, axis=1) == self.count][:missing]
            kept.append(np.nonzero(heads)[1].reshape(-1, self.count))
            missing -= len(heads)
        return np.concatenate(kept)


def fit_cps(chances: Floats, count: int) -> ConditionalPoisson:
    """Find the coins whose conditional inclusion is `chances`, to about 1e-13.

    Args:
        chances: (N,) π in (0, 1) with Σπ = count.
        count: 0 < count < N.

    Source: Chen, Dempster & Liu, Biometrika 1994; the diagonal is that of Deville & Tillé 2005 (Hájek 1981).
    """
    target = np.log(chances) - np.log1p(-chances)
    damping = 1.0 - _hajek_share(chances * (1.0 - chances))
    log_odds = _start(chances, count, target)
    for _ in range(500):
        log_odds = log_odds + pb.tilt(log_odds, count)
        coins = pb.sigmoid(log_odds)
        less, same, hit = pb.leave_one_out(coins, count)
        misfit = float(np.abs(coins * less / hit - chances).max())
        if misfit <= TOLERANCE:
            break
        realized = log_odds + np.log(np.maximum(less, ROUNDING) / np.maximum(same, ROUNDING))
        log_odds = log_odds + damping * (target - realized)
    assert misfit <= ACCEPTABLE, f"conditional Poisson fit stopped {misfit:.1e} away from π"
    return ConditionalPoisson(coins, count, hit)


def _start(chances: Floats, count: int, target: Floats) -> Floats:
    """Log-odds to begin with: exact for one term drawn or one left out, else those of π."""
    if count == 1:
        return np.log(chances)
    if count == chances.size - 1:
        return -np.log1p(-chances)
    return target


def _hajek_share(variances: Floats) -> Floats:
    """dᵢ/Σd at most ½, where dᵢ − dᵢ²/Σd = πᵢ(1 − πᵢ), by fixed-point iteration."""
    d = variances
    for _ in range(20):
        total = d.sum()
        d = 0.5 * total * (1.0 - np.sqrt(np.maximum(0.0, 1.0 - 4.0 * variances / total)))
    return np.asarray(np.minimum(d / d.sum(), 0.5))
