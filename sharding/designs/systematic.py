"""Systematic sampling: lay the πs end to end on a line and take the terms under k points a unit apart.

One uniform number decides the sample. Neighbors in order of index exclude each other, so it is the order that
shapes the joint probabilities, many of which are 0.
"""

from dataclasses import dataclass

import numpy as np

from sharding.designs.base import Floats, Indices


@dataclass(frozen=True)
class Systematic:
    """(N,) chances in (0, 1) and their sum."""

    chances: Floats
    count: int

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) ascending positions.

        Source: Madow 1949; Tillé 2006, Algorithm 7.1.
        """
        ends = np.cumsum(self.chances)[:-1]
        steps = np.arange(self.count)
        found = np.searchsorted(ends, rng.random((size, 1)) + steps, side="right")
        # Rounding may put two points in one term with π near 1; the second then goes to the next term.
        distinct = np.maximum.accumulate(found - steps, axis=1) + steps
        return np.minimum(distinct, self.chances.size - self.count + steps)
