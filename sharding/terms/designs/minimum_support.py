"""Minimum support: π written as a mixture of at most N fixed samples; a draw picks one of them.

Take the k largest remainders of π as a sample and give it the largest weight that leaves a valid π:
then some term of the sample is used up, or some other term must be in all samples to come. Each step
settles one term. The least random of the designs (the opposite of CPS) and the fastest to draw from.
"""

from dataclasses import dataclass

import numpy as np

from sharding.terms.designs.design import Floats, Indices


@dataclass(frozen=True)
class MinimumSupport:
    """(S, k) samples and (S,) their cumulative chances; S ≤ N."""

    samples: Indices
    cumulative: Floats

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, k) positions."""
        picks = np.searchsorted(self.cumulative[:-1], rng.random(size), side="right")
        return self.samples[picks]


def fit_minimum_support(chances: Floats, count: int) -> MinimumSupport:
    """Split π into samples and their chances.

    Args:
        chances: (N,) π in (0, 1) with Σπ = count.
        count: 0 < count < N.

    Source: Deville & Tillé, Biometrika 1998; Tillé 2006, Algorithm 6.5.
    """
    left, mass = chances.copy(), 1.0  # yet to be covered: 0 ≤ left ≤ mass, Σ left = count·mass
    unsettled = np.arange(chances.size)
    always: list[int] = []  # terms whose `left` equals `mass`: in all further samples
    samples, weights = [], []
    while 0 < (need := count - len(always)) < unsettled.size:
        order = np.argpartition(-left[unsettled], need - 1)
        inside, outside = unsettled[order[:need]], unsettled[order[need:]]
        smallest, largest = inside[np.argmin(left[inside])], outside[np.argmax(left[outside])]
        used_up = left[smallest] <= mass - left[largest]
        weight = max(0.0, left[smallest] if used_up else mass - left[largest])
        samples.append([*always, *inside])
        weights.append(weight)
        left[inside] -= weight
        mass -= weight
        if not used_up:
            always.append(largest)
        unsettled = unsettled[unsettled != (smallest if used_up else largest)]
    samples.append([*always, *unsettled[:need]])
    return MinimumSupport(np.array(samples, dtype=np.int64), np.cumsum([*weights, mass]))
