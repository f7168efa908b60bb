"""The base of all designs: the check of π, the terms that need no draw, and the order of the result.

The draw itself sees only the terms with 0 < π < 1, whose π sum to an integer. Terms with π = 1 are always
in the sample and those with π = 0 never.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.errors import UserError
from sharding.validation import as_floats, check_probabilities

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

EDGE = 1e-14  # nearer than this to 0 or 1, π is taken for 0 or 1: no run would ever see the difference
SUM_TOLERANCE = 1e-6


class TermSampler(Protocol):
    """The part of a design that differs: a distribution over samples of the terms with 0 < π < 1."""

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, k) positions among those terms, in any order."""


Fit = Callable[[Floats, int], TermSampler]  # from π of the free terms, and its sum k with 0 < k < len(π)


@dataclass(frozen=True)
class Design:
    """A distribution over samples of distinct terms, ready to draw; made by `fit`."""

    certain: Indices  # terms of every sample
    free: Indices  # terms that the sampler draws from
    sampler: TermSampler | None  # None when nothing is left to chance

    @classmethod
    def fit(cls, inclusion: ArrayLike, fit_free: "Fit") -> "Design":
        """Prepare a design for drawing samples that honor π.

        Args:
            inclusion: π, shape (N,), in [0, 1]; its sum is a whole number, to 1e-6.
            fit_free: The design's own preparation, for the terms with 0 < π < 1.

        Raises:
            UserError: π is invalid.
        """
        certain, free, chances = split(inclusion)
        return cls(certain, free, fit_free(chances, round(chances.sum())) if free.size else None)

    def draw(self, rng: np.random.Generator, size: int | None = None) -> Indices:
        """Return ascending indices: (n,), or (size, n) for `size` independent samples."""
        rows = 1 if size is None else size
        drawn = np.broadcast_to(self.certain, (rows, self.certain.size))
        if self.sampler is not None:
            drawn = np.concatenate([drawn, self.free[self.sampler.draw(rng, rows)]], axis=1)
        drawn = np.sort(drawn, axis=1)
        return drawn[0] if size is None else drawn


def split(inclusion: ArrayLike) -> tuple[Indices, Indices, Floats]:
    """Check π and take out the terms with π = 0 or 1.

    Returns:
        the terms with π = 1, those with 0 < π < 1, and their π, rescaled so that the sum is whole to rounding.

    Raises:
        UserError: π is not a vector, has an entry outside [0, 1] or NaN, or does not sum to a whole number
        ≥ 1.
    """
    pi = np.array(as_floats(inclusion, "inclusion"))
    if pi.ndim != 1 or pi.size == 0:
        raise UserError(f"inclusion has shape {pi.shape}; a non-empty vector is needed, one entry for each term")
    check_probabilities(pi, "inclusion")
    total, num_terms = float(pi.sum()), round(float(pi.sum()))
    if num_terms == 0 or abs(total - num_terms) > SUM_TOLERANCE * num_terms:
        raise UserError(
            f"inclusion sums to {total:.9g}; a whole number of at least 1 (to {SUM_TOLERANCE:g} of it) is "
            "needed: compute it in float64 with a whole budget"
        )
    certain = np.flatnonzero(pi >= 1.0 - EDGE)
    indices = np.flatnonzero((pi > EDGE) & (pi < 1.0 - EDGE))
    count = num_terms - certain.size
    if 0 < count < indices.size:
        return certain, indices, _summing_to(pi[indices], count)
    # What is left, if anything, differs from 0 or 1 by less than the sum's tolerance.
    certain = np.sort(np.argsort(-pi, kind="stable")[:num_terms])
    return certain, indices[:0], pi[:0]


def _summing_to(chances: Floats, count: int) -> Floats:
    """Scale the chances, or their complements, so that none leaves [0, 1] and the sum is `count`."""
    total = float(chances.sum())
    if total > count:
        return chances * (count / total)
    missing = chances.size - total
    return 1.0 - (1.0 - chances) * ((chances.size - count) / missing)
