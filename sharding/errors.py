"""A user's mistake, reported in one line, and the words of its message."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from reprlib import Repr
from typing import TypeVar

Entry = TypeVar("Entry")

LONGEST = 2000  # characters of a message


class UserError(ValueError):
    """A caller's mistake, explained in one line; the command line shows only that line.

    The message is always one line, and is cut in the middle where it is too long.
    """

    def __init__(self, message: str) -> None:
        line = "".join(c if c.isprintable() else " " if c == "\n" else ascii(c)[1:-1] for c in message)
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
        super().__init__(line)


def safe_repr(value: object) -> str:
    """Return a value for a message: its `repr`, cut if it is long."""
    return _REPR.repr(value)


_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def join_first(names: Sequence[object], most: int = 3) -> str:
    """Return the first names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def suggest(name: str, allowed: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `` (did you mean 'x'?)`` for the closest allowed name, or nothing when none is close.

    The cutoff is the least similarity, in 0…1, of a close name.
    """
    close = get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def lookup(registry: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """Look `name` up in a registry of `kind`s (``"strategy"``, ``"dataset"``, …).

    Raises:
        UserError: the name is not in the registry; the message lists all names, and the nearest one.
    """
    if not registry:
        raise UserError(f"unknown {kind} {safe_repr(name)}: none is registered; import the module that registers it")
    if not isinstance(name, str) or name not in registry:
        near, names = suggest(str(name)[:80], registry), ", ".join(sorted(registry))
        raise UserError(f"unknown {kind} {safe_repr(name)}{near}; choose one of: {names}")
    return registry[name]
