"""Check arguments: their types, numbers and vectors."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from inspect import signature
from math import isfinite
from types import UnionType
from typing import Any, ParamSpec, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sharding.errors import UserError, safe_repr

Vector = NDArray[np.float64]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
INIT = ".__init__"


def typed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Check the types of a public function's arguments where it is called; numbers have checks of their own.

    Raises:
        UserError: at a call, an argument has none of the types that its annotation names.
    """
    parameters = signature(function)

    @cache
    def kinds() -> dict[str, tuple[type, ...]]:  # annotations can name what is defined later
        return {name: _kinds(annotation) for name, annotation in get_type_hints(function).items()}

    @wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for name, value in parameters.bind(*args, **kwargs).arguments.items():
            allowed = kinds().get(name, ())
            of_one = (Iterable, Sequence) if isinstance(value, Tensor | str | bytes) else ()  # which is not several
            if allowed and not isinstance(value, tuple(kind for kind in allowed if kind not in of_one)):
                found = f"a class, {value.__name__}," if isinstance(value, type) else f"of type {type(value).__name__}"
                needed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
                raise UserError(f"{function.__qualname__.removesuffix(INIT)}: {name} is {found}; {needed} is needed")
        return function(*args, **kwargs)

    return checked


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Return the classes that an annotation names; none if it names numbers or arrays, or anything is allowed."""
    union = isinstance(annotation, UnionType) or get_origin(annotation) is Union
    kinds = tuple(get_origin(part) or part for part in (get_args(annotation) if union else (annotation,)))
    unchecked = (int, float, complex, np.ndarray, Any)
    return kinds if all(isinstance(kind, type) and kind not in unchecked for kind in kinds) else ()


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


def as_whole(value: object, name: str, most: int | None = None) -> int:
    """Return a whole number as an int.

    Raises:
        UserError: it is not whole, below 1, or above `most`.
    """
    if is_whole(value) and value >= 1 and (most is None or value <= most):
        return int(value)
    allowed = "of at least 1" if most is None else f"from 1 to {most}"
    raise UserError(f"{name} is {safe_repr(value)}; a whole number {allowed} is needed")


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
