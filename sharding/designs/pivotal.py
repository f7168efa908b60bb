"""Randomized pivotal sampling: terms meet in random order, two at a time, and fight for each other's π.

Of two terms with a + b < 1 one is out and the other continues with a + b; with a + b ≥ 1 one is in and the
other continues with a + b − 1. The chances of winning leave both means as they were, so π is exact.
"""

from dataclasses import dataclass

import numpy as np

from sharding.designs.base import Floats, Indices


@dataclass(frozen=True)
class Pivotal:
    """(N,) chances and their sum."""

    chances: Floats
    count: int

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) positions.

        Source: Deville & Tillé, Biometrika 1998; Tillé 2006, Section 6.3.
        """
        return np.array([self._draw_one(rng) for _ in range(size)], dtype=np.int64)

    def _draw_one(self, rng: np.random.Generator) -> list[int]:
        order = rng.permutation(self.chances.size)
        uniforms = rng.random(self.chances.size - 1).tolist()
        chances = self.chances[order].tolist()
        terms = order.tolist()
        drawn: list[int] = []
        champion, a = terms[0], chances[0]
        for challenger, b, u in zip(terms[1:], chances[1:], uniforms, strict=True):
            both = a + b
            if both < 1.0:
                champion = champion if u * both < a else challenger
                a = both
            else:
                champion_in = u * (2.0 - both) < 1.0 - b
                drawn.append(champion if champion_in else challenger)
                champion = challenger if champion_in else champion
                a = both - 1.0
        if len(drawn) < self.count:  # the rest of the sum is 1, up to rounding
            drawn.append(champion)
        return drawn
