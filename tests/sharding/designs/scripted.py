"""Exact distributions of the real samplers: scripted uniforms, and bisection of where the outcome changes."""

from collections import defaultdict
from itertools import pairwise, product

import numpy as np

LOW, HIGH = 1e-12, 1.0 - 1e-12


class Scripted:
    """Stands in for a numpy Generator: hands out prepared arrays, whatever shape is asked for."""

    def __init__(self, *uniforms):
        self._uniforms = [np.asarray(u, dtype=float) for u in uniforms]

    def random(self, shape):
        """Return the next prepared array; a one-row array is repeated to fill the shape."""
        values = self._uniforms.pop(0)
        return np.broadcast_to(values, shape) if values.ndim < np.ndim(np.empty(shape)) else values.reshape(shape)


def pieces(outcome, grid=400):
    """Split [0, 1) where a piecewise constant outcome(u) changes, to rounding: a list of (length, middle).

    Pieces shorter than a step of the grid may be missed; the inclusion computed from them would then be off.
    """
    points = np.linspace(LOW, HIGH, grid)
    values = [outcome(u) for u in points]
    edges = [0.0]
    for a, b, left, right in zip(points, points[1:], values, values[1:], strict=False):
        edges.extend(_changes(outcome, a, b, left, right))
    edges.append(1.0)
    return [(b - a, 0.5 * (a + b)) for a, b in pairwise(edges)]


def _changes(outcome, a, b, left, right):
    """Every change between a and b: one by bisection, then the rest of the interval."""
    changes = []
    while left != right:
        low, high = a, b
        for _ in range(60):
            middle = 0.5 * (low + high)
            if outcome(middle) == left:
                low = middle
            else:
                high = middle
        changes.append(high)
        a, left = high, outcome(high)
    return changes


def distribution_of(draw, steps, grid=60):
    """Return the distribution of a sampler that uses `steps` uniforms one after the other, as a tree of decisions.

    draw(uniforms) returns the drawn terms in whatever order shows the decisions. At each step the threshold
    is bisected for the decisions made before, so the tree is the sampler's own.
    """
    distribution = defaultdict(float)

    def descend(prefix, chance):
        later = steps - len(prefix)
        if later == 0:
            distribution[tuple(sorted(draw(prefix)))] += chance
            return
        corners = list(product([LOW, HIGH], repeat=later - 1))

        def signature(u):
            return tuple(tuple(draw([*prefix, u, *corner])) for corner in corners)

        for length, middle in pieces(signature, grid):
            descend([*prefix, middle], chance * length)

    descend([], 1.0)
    return dict(distribution)
