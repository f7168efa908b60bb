"""Errors: a user's mistake, reported in one line, and a client's failure, which has a kind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from reprlib import Repr
from typing import TypeVar

Entry = TypeVar("Entry")

LONGEST = 2000  # characters of a message
LONGEST_FOREIGN = 500  # characters kept of another machine's message


class UserError(ValueError):
    """A caller's mistake, explained in one line; the command line shows only that line.

    The message is always one line, and is cut in the middle where it is too long.
    """

    def __init__(self, message: str) -> None:
        line = "".join(c if c.isprintable() else " " if c == "\n" else ascii(c)[1:-1] for c in message)
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
        super().__init__(line)


class Kind(StrEnum):
    """The kind of failure that keeps a client's update out of a round."""

    ABSENT = "absent"
    LATE = "late"
    OTHER_PLAN = "another plan"
    NOT_FINITE = "not finite"
    TOO_LONG = "too long"
    MALFORMED = "malformed"
    CONTRADICTORY = "contradicts itself"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """Why a client's update is left out of a round.

    Attributes:
        kind: for programs.
        message: for people: one printable line, whatever the client sent.
    """

    kind: Kind
    message: str

    def __post_init__(self) -> None:
        """Make the message one line."""
        object.__setattr__(self, "message", one_line(self.message))

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, error: UserError) -> "Failure":
        """Return the failure of an error; an update that cannot be read is malformed."""
        return error.failure if isinstance(error, FailureError) else cls(Kind.MALFORMED, str(error))


class FailureError(UserError):
    """A client's failure as an exception."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, str(self))


def one_line(words: object) -> str:
    """Return another machine's message as one printable line, which cannot forge log lines or control a terminal."""
    line = " ".join(str(words)[: 2 * LONGEST_FOREIGN].split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:LONGEST_FOREIGN]


def shown(value: object) -> str:
    """Return a value for a message: its `repr`, cut if it is long."""
    return _REPR.repr(value)


_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def few(names: Sequence[object], most: int = 3) -> str:
    """Return the first names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `` (did you mean 'x'?)`` for the closest allowed name, or nothing when none is close.

    Args:
        name: the unknown name.
        allowed: the known names.
        cutoff: the least similarity, in 0…1, of a close name.
    """
    close = get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pick(registry: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """Look `name` up in a registry of `kind`s (``"strategy"``, ``"dataset"``, …).

    Raises:
        UserError: the name is not in the registry; the message lists all names, and the nearest one.
    """
    if not registry:
        remedy = "none is registered; import one with --import MODULE"
        raise UserError(f"unknown {kind} {shown(name)}: {remedy}")
    if not isinstance(name, str) or name not in registry:
        near, names = nearest(str(name)[:80], registry), ", ".join(sorted(registry))
        raise UserError(f"unknown {kind} {shown(name)}{near}; choose one of: {names}")
    return registry[name]
