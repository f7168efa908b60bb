"""Check numbers and vectors."""

from math import isfinite
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sharding.errors import UserError, safe_repr

Vector = NDArray[np.float64]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number that a float can hold; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return isfinite(value)
    except OverflowError:
        return False


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; a float can be one."""
    return is_number(value) and float(value).is_integer()


def as_whole(value: object, name: str, most: int | None = None, least: int = 1) -> int:
    """Return a whole number as an int.

    Raises:
        UserError: it is not whole, below `least`, or above `most`.
    """
    if is_whole(value) and value >= least and (most is None or value <= most):
        return int(value)
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise UserError(f"{name} is {safe_repr(value)}; a whole number {allowed} is needed")


def as_seed(value: object) -> int:
    """Return a seed as an int. No value stands for "random": it would be a seed that everybody knows.

    Raises:
        UserError: it is not a whole number of at least 0.
    """
    return as_whole(value, "seed", least=0)


def as_round(value: object) -> int:
    """Return a round's number as an int.

    Raises:
        UserError: it is not a whole number of at least 0.
    """
    return as_whole(value, "round", least=0)


def as_floats(values: Any, name: str) -> Vector:
    """Return an array in float64; subclasses of arrays are kept.

    Raises:
        UserError: complex values, or no numbers.
    """
    try:
        array = np.asanyarray(values)
        if array.dtype.kind != "c":
            return array.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{name} is {safe_repr(values)}; real numbers are needed") from error
    raise UserError(f"{name} has complex values; real ones are needed: take np.abs of them")


def check_probabilities(values: Vector, name: str) -> None:
    """Check that a vector's entries are probabilities.

    Raises:
        UserError: one is outside [0, 1] or NaN.
    """
    bad = np.flatnonzero(~((values >= 0.0) & (values <= 1.0)))
    if bad.size:
        raise UserError(
            f"{name}[{bad[0]}] is {values[bad[0]]}; probabilities in [0, 1] are needed: "
            "use one of sharding.terms.inclusion's solvers, or np.clip against rounding"
        )


def as_amounts(values: Any, name: str) -> Vector:
    """Return a vector of finite numbers of at least 0, in float64.

    Raises:
        UserError: anything else.
    """
    vector = np.asarray(as_floats(values, name))
    if vector.ndim != 1:
        raise UserError(f"{name} has shape {vector.shape}; a vector is needed")
    bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= 0.0)))
    if bad.size:
        raise UserError(f"{name}[{bad[0]}] is {vector[bad[0]]}; finite numbers of at least 0 are needed")
    return vector
