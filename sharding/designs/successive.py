"""Successive sampling: each next term in proportion to the remaining weights; numpy's `choice(replace=False)`.

Drawn as a race: term i finishes after Eᵢ/wᵢ, Eᵢ exponential, and the first n are the sample. PriSM starts
from weights (`successive_design`); for a given π, `fit_successive` finds the weights with exactly this inclusion.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sharding.designs.base import Design, Floats, Indices
from sharding.inclusion import successive_inclusion
from sharding.inclusion.checks import weights_for

TOLERANCE = 1e-12
ACCEPTABLE = 1e-9  # should rounding keep the fit from its tolerance


def successive_design(weights: ArrayLike, num_terms: int) -> Design:
    """Return successive sampling from weights: the law of `numpy.random.choice(N, n, replace=False, p=w/Σw)`.

    Finishing times are compared as logarithms, so weights may span any range (1e-30…1 and more).

    Args:
        weights: (N,) w ≥ 0, in any order and of any scale; a weight of 0 is never drawn.
        num_terms: n, at most the number of positive weights.

    Raises:
        UserError: weights negative or not finite, or fewer positive ones than `num_terms`.
    """
    scaled, n = weights_for(weights, num_terms)
    return Design(np.empty(0, np.int64), np.arange(scaled.size), Race.of(scaled, n))


@dataclass(frozen=True)
class Race:
    """(N,) log-rates, and how many places there are."""

    log_rates: Floats
    count: int

    @classmethod
    def of(cls, weights: Floats, count: int) -> "Race":
        """A race with the given rates; a rate of 0 never finishes."""
        with np.errstate(divide="ignore"):
            return cls(np.log(weights), count)

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) positions."""
        uniforms = rng.random((size, self.log_rates.size))
        log_times = np.log(-np.log1p(-uniforms) + np.finfo(float).tiny) - self.log_rates
        return np.argpartition(log_times, self.count - 1, axis=1)[:, : self.count]


def fit_successive(chances: Floats, count: int) -> Race:
    """Find weights whose exact successive inclusion is `chances`, to about 1e-12.

    The asymptotic law π = 1 − e^(−w) gives the start, and the same relation turns each misfit into a factor
    for w.

    Args:
        chances: (N,) π in (0, 1) with Σπ = count.
        count: 0 < count < N.
    """
    if count == 1:
        return Race.of(chances, count)
    target = np.log(-np.log1p(-chances))
    log_rates = target
    for _ in range(200):
        realized = successive_inclusion(np.exp(log_rates - log_rates.max()), count)
        misfit = float(np.abs(realized - chances).max())
        if misfit <= TOLERANCE:
            break
        realized = np.clip(realized, np.finfo(float).tiny, 1.0 - np.finfo(float).epsneg)
        log_rates = log_rates + target - np.log(-np.log1p(-realized))
    assert misfit <= ACCEPTABLE, f"successive fit stopped {misfit:.1e} away from π"
    return Race(log_rates, count)
