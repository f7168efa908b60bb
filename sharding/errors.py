"""A user's mistake is told in one line: the value, what is allowed, and the remedy."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

Entry = TypeVar("Entry")


class UserError(ValueError):
    """Something the caller asked for that one line can explain; the command line shows just that line."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest allowed name, or nothing when none is close."""
    close = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pick(registry: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """Look `name` up in a registry of `kind`s (``"strategy"``, ``"dataset"``, …).

    Raises:
        UserError: the name is not in the registry; the message lists what is, and the nearest name.
    """
    if name not in registry:
        raise UserError(
            f"unknown {kind} {name!r}{nearest(name, registry)}; choose one of: {', '.join(sorted(registry))}"
        )
    return registry[name]
