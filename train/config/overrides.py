"""Overrides ``key=value`` of a command line, and grids of them, ``key=value,value``."""

from collections.abc import Iterable, Sequence
from itertools import product

from sharding.errors import UserError, safe_repr


def settings(overrides: Iterable[str]) -> list[tuple[str, str]]:
    """Return the key of each ``key=value``, and the whole override."""
    return [(override.partition("=")[0], override) for override in overrides]


def check_once(settings: Iterable[tuple[str, str]]) -> None:
    """Raise a UserError if two of these overrides, each with its key, set one key."""
    seen: dict[str, str] = {}
    for key, override in settings:
        if key in seen:
            raise UserError(
                f"{safe_repr(key)} is set twice, by {safe_repr(seen[key])} and {safe_repr(override)}; keep one of them"
            )
        seen[key] = override


def expand(grids: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every point of a grid, with each axis written as ``key=value,value``.

    Commas in brackets belong to a value: ``keep_ratio={0.2: 0.5, 0.4: 0.5},0.3`` has two.

    Raises:
        UserError: an axis without values.
    """
    axes = []
    for axis in grids:
        key, _, values = axis.partition("=")
        each = [value.strip() for value in _split(values)]
        if not key or not all(each):
            raise UserError(f"cannot read the grid {axis!r}; write key=value,value, e.g. keep_ratio=0.1,0.2")
        axes.append([f"{key}={value}" for value in dict.fromkeys(each)])
    return list(product(*axes))


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces
