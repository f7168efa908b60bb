"""Ranges of the models' options."""

from collections.abc import Sequence

from sharding.errors import UserError


def positive(**numbers: float | Sequence[int]) -> None:
    """Raise a UserError that names a number, or list of numbers, that is empty or not above zero."""
    for option, value in numbers.items():
        values = value if isinstance(value, Sequence) else (value,)
        if not values or min(values) <= 0:
            raise UserError(f"{option}={value} must be positive")


def fraction(**numbers: float) -> None:
    """Raise a UserError that names a dropout rate outside [0, 1)."""
    for option, value in numbers.items():
        if not 0 <= value < 1:
            raise UserError(f"{option}={value} must be at least 0 and below 1")
