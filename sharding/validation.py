"""Check arguments: their types, numbers and vectors."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from inspect import signature
from math import isfinite
from types import UnionType
from typing import Any, ParamSpec, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sharding.errors import UserError, safe_repr

Vector = NDArray[np.float64]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
INIT = ".__init__"
LEAST = 1e-290  # reciprocals of sums of smaller numbers overflow


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


def as_whole(value: object, name: str, most: int | None = None, least: int = 1) -> int:
    """Return an int, or raise a UserError unless the number is whole, at least `least` and at most `most`."""
    if is_whole(value) and value >= least and (most is None or value <= most):
        return int(value)
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise UserError(f"{name} is {safe_repr(value)}; a whole number {allowed} is needed")


def as_floats(values: Any, name: str) -> Vector:
    """Return an array in float64, of its own class; raise a UserError for complex values, and for no numbers."""
    try:
        array = np.asanyarray(values)
        if array.dtype.kind != "c":
            return array.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{name} is {safe_repr(values)}; real numbers are needed") from error
    raise UserError(f"{name} has complex values; real ones are needed: take np.abs of them")


def check_probabilities(values: Vector, name: str) -> None:
    """Raise a UserError if an entry of a vector is outside [0, 1] or NaN."""
    bad = np.flatnonzero(~((values >= 0.0) & (values <= 1.0)))
    if bad.size:
        raise UserError(
            f"{name}[{bad[0]}] is {values[bad[0]]}; probabilities in [0, 1] are needed: "
            "use one of sharding.terms.inclusion's solvers, or np.clip against rounding"
        )


def as_amounts(values: Any, name: str) -> Vector:
    """Return a vector of finite numbers of at least 0, in float64, or raise a UserError."""
    vector = np.asarray(as_floats(values, name))
    if vector.ndim != 1:
        raise UserError(f"{name} has shape {vector.shape}; a vector is needed")
    bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= 0.0)))
    if bad.size:
        raise UserError(f"{name}[{bad[0]}] is {vector[bad[0]]}; finite numbers of at least 0 are needed")
    return vector


def as_alike(**vectors: Any) -> tuple[Vector, ...]:
    """Return vectors of one length, given by their names, each as `as_amounts` does, or raise a UserError."""
    checked = [as_amounts(values, name) for name, values in vectors.items()]
    sizes = [str(vector.size) for vector in checked]
    if len({*sizes}) > 1:
        raise UserError(f"{' and '.join(vectors)} have {' and '.join(sizes)} entries; one of each a client is needed")
    return tuple(checked)


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

    Raise a UserError for weights negative or not finite, or fewer positive ones than `num_terms`.
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
