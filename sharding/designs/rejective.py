"""Independent coin flips, kept if exactly the right number came up heads."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

ENTRIES = 1 << 18  # coins flipped at once, at most


def rejective(
    chances: Floats,
    count: int,
    rng: np.random.Generator,
    size: int,
    tries: float,
) -> Indices:
    """Draw `size` samples by flipping all coins until `count` of them show heads.

    Args:
        chances: (N,) chance of heads.
        count: heads wanted.
        rng: source of randomness.
        size: samples wanted.
        tries: flips of all coins expected for one sample; sets the size of the blocks, not the law.

    Returns:
        (size, count) positions, ascending.
    """
    kept: list[Indices] = []
    missing = size
    while missing > 0:
        rows = max(1, min(int(np.ceil(missing * tries)), ENTRIES // chances.size))
        heads = rng.random((rows, chances.size)) < chances
        heads = heads[np.count_nonzero(heads, axis=1) == count][:missing]
        kept.append(np.nonzero(heads)[1].reshape(-1, count))
        missing -= len(heads)
    return np.concatenate(kept)
