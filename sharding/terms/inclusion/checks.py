"""Check the input of the inclusion solvers, with one-line errors."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.errors import UserError
from sharding.validation import as_amounts, as_whole

LEAST = 1e-290  # reciprocals of sums of smaller numbers overflow


def nonnegative(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return `values` as a float64 vector divided by its largest entry; inclusion does not depend on the scale.

    Zeros come back as +0.0: the reciprocal of −0.0 is −∞. So does less than `LEAST` of the largest.

    Raises:
        UserError: not a vector, empty, negative, complex or not finite.
    """
    vector = as_amounts(values, name)
    if vector.size == 0:
        raise UserError(f"{name} is empty; a non-empty vector is needed")
    largest = vector.max()
    scaled = (vector / largest if largest > 0.0 else vector) + 0.0
    return np.where(scaled < LEAST, 0.0, scaled)


def positives_first(positive: NDArray[np.bool_], num_terms: int) -> NDArray[np.float64] | None:
    """Inclusion if the positive magnitudes cannot fill the budget: they have π = 1, and zeros share the rest.

    Returns:
        (N,) inclusion, or None when there are more positive magnitudes than terms to draw.
    """
    left, zeros = num_terms - int(positive.sum()), int((~positive).sum())
    if left < 0:
        return None
    return np.where(positive, 1.0, left / max(zeros, 1))


def weights_for(weights: ArrayLike, num_terms: int) -> tuple[NDArray[np.float64], int]:
    """Return the weights of successive sampling, divided by the largest, and the number of terms to draw.

    Raises:
        UserError: weights negative or not finite, or fewer positive ones than `num_terms`.
    """
    scaled = nonnegative(weights, "weights")
    n = as_whole(num_terms, "num_terms", most=scaled.size)
    positive = np.count_nonzero(scaled)
    if positive < n:
        raise UserError(
            f"num_terms is {n} but only {positive} weights are positive, and a weight of 0 is never drawn: "
            "draw fewer terms, or give every term a positive weight"
        )
    return scaled, n
