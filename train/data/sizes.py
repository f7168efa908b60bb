"""Unequal sizes of clients by a power law."""

import numpy as np
from numpy.typing import NDArray


def power_law_sizes(num_samples: int, num_clients: int, rng: np.random.Generator, alpha: float) -> NDArray[np.int64]:
    """Return sizes ∝ k^−α, at least 1 each, in random order: int64 (clients,), summing to `num_samples`."""
    weights = np.arange(1, num_clients + 1, dtype=np.float64) ** -alpha
    ends = np.round(np.cumsum(weights) / weights.sum() * (num_samples - num_clients)).astype(np.int64)
    return rng.permutation(1 + np.diff(ends, prepend=0))
