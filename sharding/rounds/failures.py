"""Why a client's update is left out of a round: a failure has a kind, for programs, and a message, for people."""

from dataclasses import dataclass
from enum import StrEnum

from sharding.errors import UserError

LONGEST = 500  # characters kept of another machine's message


class Kind(StrEnum):
    """The kind of failure that keeps a client's update out of a round."""

    ABSENT = "absent"
    LATE = "late"
    OTHER_PLAN = "another plan"
    NOT_FINITE = "not finite"
    MALFORMED = "malformed"
    CONTRADICTORY = "contradicts itself"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """Why a client's update is left out of a round.

    Attributes:
        kind: the kind of failure, for programs.
        message: one printable line for people, whatever the client sent.
    """

    kind: Kind
    message: str

    def __post_init__(self) -> None:
        """Make the message one line."""
        object.__setattr__(self, "message", one_line(self.message))

    def __str__(self) -> str:
        return self.message

    @classmethod
    def in_training(cls, error: Exception) -> "Failure":
        """Return the failure of a client whose training raised an error, with a hint if there is one."""
        return cls(Kind.FAILED, f"{type(error).__name__}: {error}{hint_at(error)}")

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return the failure of an error in reading; an update that cannot be read is malformed."""
        if isinstance(error, FailureError):
            return error.failure
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return cls(Kind.MALFORMED, f"{name}{error}")


# Where torch's message does not say what to do.
HINTS = {
    "Expected more than 1 value per channel": "a batch norm cannot train on a batch of one sample; drop the last batch "
    "(drop_last=True of a DataLoader), or choose another batch size"
}


def hint_at(error: object) -> str:
    """Return `` (what to do)`` for an error of torch, or nothing."""
    return next((f" ({hint})" for message, hint in HINTS.items() if message in str(error)), "")


class FailureError(UserError):
    """A client's failure as an exception."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, str(self))


def one_line(message: object) -> str:
    """Return another machine's message as one printable line, which cannot forge log lines or control a terminal."""
    line = " ".join(str(message)[: 2 * LONGEST].split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:LONGEST]
