"""Whether a run has ended or diverged, according to the metrics of its rounds."""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_LOST = 5  # a run ends after this many rounds in a row without a usable update


def has_ended(lines: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Return whether a run of `rounds` rounds has ended with these lines, early or not, and did not diverge."""
    ended = len(lines) == rounds or (bool(lines) and "stopped" in lines[-1])
    return ended and not has_diverged([*map(is_lost, lines)], rounds)


def is_lost(line: Mapping[str, Any]) -> bool:
    """Return whether clients failed in a round and no update could be used."""
    return bool(line.get("num_failed")) and not line.get("num_aggregated")


def has_diverged(lost: Sequence[bool], rounds: int) -> bool:
    """Return whether the last rounds of a run of `rounds` rounds were all lost, which ends it."""
    limit = min(MAX_LOST, rounds)
    return len(lost) >= limit and all(lost[-limit:])
