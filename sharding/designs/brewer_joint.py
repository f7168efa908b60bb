"""Joint inclusion of Brewer's method.

Suppose neither i nor j is drawn yet, with m draws to go and A = Σπ over the terms left. Term i comes next
with a known chance, and j is then still to come with chance (m − 1)πⱼ/(A − πᵢ), since the rest is Brewer's
method again and honors its π. So Pr(i, j) is a sum over steps of an expectation over the terms drawn so far.

That expectation depends on *which* terms they are, not on their order, so it is summed over sets. Their
number grows like N choose n − 2, and no shorter way is known.
"""

from math import comb

import numpy as np
from numpy.typing import NDArray

from sharding.designs.base import Free
from sharding.designs.brewer import step_chances
from sharding.errors import UserError

Floats = NDArray[np.float64]

MOST_TERMS = 64  # a set is the bits of one integer
MOST_SETS = 1 << 23
ROWS = 1 << 13  # sets handled at once


def brewer_joint_inclusion(free: Free) -> Floats:
    """Pr(i and j drawn) for the free terms, π on the diagonal: (F, F).

    Exact. Possible while at most 2²³ sets of terms can have been drawn before the last two: any n for F ≤
    25, n ≤ 7 for F = 64 (a minute and 3 GB; n = 5 takes a tenth of a second).

    Raises:
        UserError: more than 64 free terms, or too many sets of them.
    """
    size, sets = free.chances.size, max(comb(free.chances.size, k) for k in range(max(free.count - 1, 1)))
    if size > MOST_TERMS or sets > MOST_SETS:
        raise UserError(
            f"the joint inclusion of 'brewer' was asked for {free.count} of {size} terms with 0 < π < 1, "
            f"that is {sets:.1e} sets; at most {MOST_SETS:.1e} sets of {MOST_TERMS} terms are possible: "
            "use design 'cps', which is close to it and has no limit"
        )
    joint = _over_sets(free.chances, free.count)
    joint += joint.T
    np.fill_diagonal(joint, free.chances)
    return joint


def _over_sets(chances: Floats, count: int) -> Floats:
    """Pr(i drawn before j), both drawn, summed over all sets that can have been drawn before i: (F, F)."""
    bits = np.uint64(1) << np.arange(chances.size, dtype=np.uint64)
    sets, weights = np.zeros(1, dtype=np.uint64), np.ones(1)
    joint = np.zeros((bits.size, bits.size))
    for draws_left in range(count, 1, -1):
        grown, shares = [], []
        for start in range(0, sets.size, ROWS):
            part = sets[start : start + ROWS, None]
            left = np.where(part & bits, 0.0, chances)
            now = step_chances(left, draws_left)
            now *= (weights[start : start + ROWS] / now.sum(axis=1))[:, None]
            joint += (now / (left.sum(axis=1, keepdims=True) - left)).T @ ((draws_left - 1) * left)
            if draws_left > 2:
                grown.append((part | bits)[now > 0.0])
                shares.append(now[now > 0.0])
        if draws_left > 2:
            sets, where = np.unique(np.concatenate(grown), return_inverse=True)
            weights = np.bincount(where.ravel(), np.concatenate(shares)).astype(np.float64)
    return joint
