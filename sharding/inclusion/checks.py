"""Check the input of the inclusion solvers, with one-line errors."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.errors import UserError, shown
from sharding.validation import as_floats, is_whole


def nonnegative(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return `values` as a float64 vector divided by its largest entry; inclusion does not depend on the scale.

    Zeros come back as +0.0: the reciprocal of −0.0 is −∞.

    Raises:
        UserError: not a vector, empty, negative, complex or not finite.
    """
    vector = np.asarray(as_floats(values, name))
    if vector.ndim != 1 or vector.size == 0:
        raise UserError(f"{name} has shape {vector.shape}; a non-empty vector is needed: pass one layer at a time")
    bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= 0.0)))
    if bad.size:
        raise UserError(
            f"{name}[{bad[0]}] is {vector[bad[0]]}; finite values of at least 0 are needed: "
            "has the training diverged, or is it a signed quantity?"
        )
    largest = vector.max()
    return (vector / largest if largest > 0.0 else vector) + 0.0


def term_count(num_terms: int, size: int) -> int:
    """Return `num_terms` as an int between 1 and `size`.

    Raises:
        UserError: not a whole number, or out of that range.
    """
    if not (is_whole(num_terms) and 1 <= num_terms <= size):
        raise UserError(f"num_terms is {shown(num_terms)}; a whole number from 1 to {size}, the rank, is needed")
    return int(num_terms)


def client_count(num_clients: int) -> int:
    """Return `num_clients` as an int of at least 1.

    Raises:
        UserError: not a whole number, or less.
    """
    if not (is_whole(num_clients) and num_clients >= 1):
        raise UserError(f"num_clients is {shown(num_clients)}; a whole number of at least 1 is needed")
    return int(num_clients)


def positives_first(positive: NDArray[np.bool_], num_terms: int) -> NDArray[np.float64] | None:
    """Inclusion if the positive magnitudes cannot fill the budget: they have π = 1, and zeros share the rest.

    Returns:
        (N,) inclusion, or None when there are more positive magnitudes than terms to draw.
    """
    left, zeros = num_terms - int(positive.sum()), int((~positive).sum())
    if left < 0:
        return None
    return np.where(positive, 1.0, left / max(zeros, 1))
