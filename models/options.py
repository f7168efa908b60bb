"""Check what a user may set on a model (`model.width=32`, …) before the model is built."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharding.errors import UserError, nearest


def check_options(name: str, build: Callable[..., Any], options: Mapping[str, object], section: str = "model") -> None:
    """Refuse an option that `build` does not have, or whose type is not that of its default.

    The keyword-only parameters of `build` are a model's options, so that a model states them in one place.

    Raises:
        UserError: naming the option, what is allowed, and the nearest right name.
    """
    defaults = options_of(build)
    allowed = ", ".join(f"{option}={default}" for option, default in defaults.items()) or "none"
    for option, value in options.items():
        if option not in defaults:
            raise UserError(
                f"{name} has no option {option!r}{nearest(option, defaults)}; options and defaults: {allowed}"
            )
        if not _fits(value, defaults[option]):
            raise UserError(
                f"{section}.{option}={value!r} must be {_kind(defaults[option])}; {name}'s defaults: {allowed}"
            )


def options_of(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters of `build` and their defaults."""
    return {
        option: parameter.default
        for option, parameter in inspect.signature(build).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def positive(**numbers: float | Sequence[int]) -> None:
    """Refuse numbers, and lists of numbers, that are empty or not above zero.

    Raises:
        UserError: naming the option and its value.
    """
    for option, value in numbers.items():
        values = value if isinstance(value, Sequence) else (value,)
        if not values or min(values) <= 0:
            raise UserError(f"model.{option}={value} must be positive")


def fraction(**numbers: float) -> None:
    """Refuse a dropout rate outside [0, 1).

    Raises:
        UserError: naming the option and its value.
    """
    for option, value in numbers.items():
        if not 0 <= value < 1:
            raise UserError(f"model.{option}={value} must be at least 0 and below 1")


def _fits(value: object, default: object) -> bool:
    """Whether a YAML value has the default's type; a bool is not a number, and an int can be a float."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(_fits(item, default[0]) for item in value)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if not isinstance(default, int | float):  # no default, or one of another type
        return default is None or default is inspect.Parameter.empty or isinstance(value, type(default))
    number = isinstance(value, int) and not isinstance(value, bool)
    return number or (isinstance(default, float) and isinstance(value, float))


def _kind(default: object) -> str:
    """Describe the values that :func:`_fits` accepts."""
    if isinstance(default, tuple):
        return "a list of whole numbers"
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int | float):
        return "a number" if isinstance(default, float) else "a whole number"
    return "a word" if isinstance(default, str) else f"of the kind of {default!r}"
