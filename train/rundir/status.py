"""Whether a run has ended, according to the metrics of its rounds."""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_LOST = 5  # a run ends after this many rounds in a row without a usable update


def has_ended(lines: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Return whether a run of `rounds` rounds has ended with these lines, early or not, and did not diverge."""
    ended = len(lines) == rounds or (bool(lines) and "stopped" in lines[-1])
    return ended and not has_diverged(lines, rounds)


def has_diverged(lines: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Return whether the last rounds of a run of `rounds` rounds had no usable update, which ends it."""
    last = lines[-min(MAX_LOST, rounds) :]
    return len(last) == min(MAX_LOST, rounds) and all(
        line.get("num_failed") and not line.get("num_aggregated") for line in last
    )
