"""Brewer's method: n draws, one term each, with chances chosen so that every π comes out exactly.

With m draws to go and A = n − Σπ over those drawn, the next term is j with chance ∝ πⱼ(A − πⱼ)/(A − mπⱼ). The
remaining problem is again Brewer's, with inclusion mπⱼ/A: the chance of being drawn now and the chance of
being drawn later add up to πⱼ at every step.
"""

from dataclasses import dataclass

import numpy as np

from sharding.terms.designs.design import Floats, Indices

SINGULAR = 1e-15  # relative: A − mπ = 0 means that the term must come next


@dataclass(frozen=True)
class Brewer:
    """(N,) chances and their sum."""

    chances: Floats
    count: int

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) positions, in the order drawn.

        Source: Brewer 1975; Tillé 2006, Algorithm 6.10.
        """
        rows = np.arange(size)
        left = np.tile(self.chances, (size, 1))  # π of the terms not drawn yet, 0 for the others
        drawn = np.empty((size, self.count), dtype=np.int64)
        for step in range(self.count):
            cumulative = np.cumsum(step_chances(left, self.count - step), axis=1)
            thresholds = rng.random((size, 1)) * cumulative[:, -1:]
            drawn[:, step] = np.count_nonzero(cumulative <= thresholds, axis=1)
            left[rows, drawn[:, step]] = 0.0
        return drawn


def step_chances(left: Floats, draws_left: int) -> Floats:
    """Unnormalized chances of the next draw: (..., N) π of the terms left, 0 for those drawn -> (..., N)."""
    if draws_left == 1:
        return left
    total = left.sum(axis=-1, keepdims=True)
    return np.asarray(left * (total - left) / np.maximum(total - draws_left * left, SINGULAR * total))
