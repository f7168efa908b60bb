"""Pareto sampling: an approximation to CPS, drawn without rejection. **π is honored approximately only.**

Term i gets the score U/(1 − U) divided by the odds πᵢ/(1 − πᵢ), U uniform, and the n smallest are the
sample. The error of π is largest for few terms (a per cent for n = 2 of 6) and of order 1/Σπ(1 − π);
multipliers 1/π are then slightly biased. Use `cps` unless the cost of a draw matters more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Pareto:
    """(N,) chances and their sum."""

    chances: Floats
    count: int

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) positions.

        Source: Rosén, J. Statist. Plann. Inference 1997; Tillé 2006, Section 7.7.
        """
        u = rng.random((size, self.chances.size))
        scores = u / (1.0 - u) * ((1.0 - self.chances) / self.chances)
        return np.argpartition(scores, self.count - 1, axis=1)[:, : self.count]
