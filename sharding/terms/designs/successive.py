"""Successive sampling: each next term in proportion to the remaining weights; numpy's `choice(replace=False)`.

Drawn as a race: term i finishes after Eᵢ/wᵢ, Eᵢ exponential, and the first n are the sample. PriSM draws so from
weights, and π follows (`sharding.terms.inclusion.successive_inclusion`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sharding.terms.designs.design import Design, Floats, Indices
from sharding.validation import weights_for


def successive_design(weights: ArrayLike, num_terms: int) -> Design:
    """Return successive sampling from weights: the distribution of `numpy.random.choice(N, n, replace=False, p=w/Σw)`.

    Finishing times are compared as logarithms, so weights may span any range (1e-30…1 and more).

    Args:
        weights: (N,) w ≥ 0, in any order and of any scale; a weight of 0 is never drawn.
        num_terms: n, at most the number of positive weights.

    Raises:
        UserError: weights negative or not finite, or fewer positive ones than `num_terms`.
    """
    scaled, n = weights_for(weights, num_terms)
    with np.errstate(divide="ignore"):  # a rate of 0 never finishes
        race = Race(np.log(scaled), n)
    return Design(np.empty(0, np.int64), np.arange(scaled.size), race)


@dataclass(frozen=True)
class Race:
    """(N,) log-rates, and how many places there are."""

    log_rates: Floats
    count: int

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) positions."""
        uniforms = rng.random((size, self.log_rates.size))
        log_times = np.log(-np.log1p(-uniforms) + np.finfo(float).tiny) - self.log_rates
        return np.argpartition(log_times, self.count - 1, axis=1)[:, : self.count]
