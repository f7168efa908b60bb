"""Sampford's design: one term k with chance ∝ πₖ(1 − πₖ), the others by independent coins of chance π.

Kept if exactly n terms are in. The chance of a sample is then ∝ Π_{i∈s} πᵢ/(1 − πᵢ) · Σ_{k∈s} (1 − πₖ), for
which Sampford proved that the inclusion probabilities are π: no fitting is needed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharding.designs.rejective import rejective

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Sampford:
    """(N,) chances and their sum."""

    chances: Floats
    count: int

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) positions.

        Source: Sampford, Biometrika 1967; Tillé 2006, Section 5.6.
        """
        variances = self.chances * (1.0 - self.chances)
        first = np.cumsum(variances)
        tries = 1.0 + 2.5 * np.sqrt(first[-1])
        return rejective(self.chances, self.count, rng, size, tries, first=first / first[-1])
