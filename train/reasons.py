"""Why clients are left out, in few enough kinds to be counted: a reason's own words name layers and numbers."""

from collections import Counter
from collections.abc import Iterable

# By kind, words of which the reasons of that kind have one; the first that fits counts, and `failed` is all the rest.
KINDS = {
    "absent": ("its node is not there", "Node Unavailable", "nothing returned"),
    "late": ("no reply within",),
    "another plan": ("an update of the plan",),
    "not finite": ("NaN or Inf", "a norm of nan", "a norm of inf"),
    "too long": ("times the median",),
    "malformed": (
        "no shard",
        "not a shard",
        "no tensor",
        "other layers",
        "has shape",
        " is torch.",
        "indices are not",
        "a message without",
        "arrays named",
        "its loss is",
        "its norm is",
        "its numbers are",
    ),
    "contradicts itself": ("but it reported", "it was not drawn", "its report has no norm"),
}
REST = "failed"


def kind_of(reason: str) -> str:
    """Return the kind of a reason."""
    return next((kind for kind, words in KINDS.items() if any(word in reason for word in words)), REST)


def count_kinds(reasons: Iterable[str]) -> dict[str, int]:
    """Return how many reasons there are of each kind that occurs, the most frequent first."""
    return dict(Counter(map(kind_of, reasons)).most_common())
