"""Checks of numbers and of vectors of numbers."""

from math import isfinite
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sharding.errors import UserError, shown


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


def as_floats(values: Any, name: str) -> NDArray[np.float64]:
    """Return an array in float64; subclasses of arrays stay what they are.

    Raises:
        UserError: complex values, or no numbers.
    """
    try:
        array = np.asanyarray(values)
        if array.dtype.kind != "c":
            return array.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{name} is {shown(values)}; real numbers are needed") from error
    raise UserError(f"{name} has complex values; real ones are needed: take np.abs of them")
