"""Checks of a client's update. Nothing that comes from a client is trusted.

An update must belong to the server's plan: its tensors are compared with those of the shard that was sent, and their
values are checked last. The values of the multipliers are not checked, since they do not enter the average.
"""

import torch
from torch import Tensor

from sharding.matrices.values import find_nonfinite, first_flagged
from sharding.modules.state import is_variance
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.shard import Shard, Update
from sharding.transport.compression import EXACT

NOTHING = Failure(Kind.ABSENT, "nothing returned")


def find_spoiled(returned: Update) -> Failure | None:
    """Return why the values of an update that fits the plan cannot be averaged, or None."""
    if (name := find_nonfinite(returned.trained())) is not None:
        return Failure(Kind.NOT_FINITE, f"NaN or Inf in {name}")
    if returned.changes:  # the variance itself is known only when the changes are averaged
        return None
    low = first_flagged([(name, (part < 0).any()) for name, part in returned.whole.items() if is_variance(name)])
    return None if low is None else Failure(Kind.MALFORMED, f"a variance below 0 in {low}")


def find_misfit(sent: Shard, returned: object) -> Failure | None:
    """Return why this is not an update of the shard that was sent, apart from its values, or None. Never raises."""
    if returned is None:
        return NOTHING
    if not isinstance(returned, Update):
        return Failure(Kind.MALFORMED, f"a {type(returned).__name__}, not an update")
    try:
        if returned.plan_id != sent.plan_id:
            return Failure(
                Kind.OTHER_PLAN, f"an update of the plan {str(returned.plan_id)[:40]!r}, not of {sent.plan_id!r}"
            )
        reason = _other_form(sent, returned) or _differing_tensor(sent, returned) or _differing_term(sent, returned)
    except Exception as error:  # parts that are not tensors, or are on several devices: not an update in any case
        reason = f"not a readable update: {type(error).__name__}: {error}"
    return None if reason is None else Failure(Kind.MALFORMED, reason)


def _other_form(sent: Shard, returned: Update) -> str | None:
    """Return the error in the update's form, if any, before tensors are compared."""
    if returned.compression != sent.compression:
        return f"an update in {str(returned.compression)[:40]}, not in {sent.compression}"
    if returned.changes != (sent.compression != EXACT):
        return (
            f"values, not the changes that {sent.compression} carries back"
            if sent.compression != EXACT
            else "changes, not values"
        )
    return None


def _differing_tensor(sent: Shard, returned: Update) -> str | None:
    """Return which of the tensors to average is missing, unknown, or of another type or shape."""
    ours, theirs = sent.trained(), returned.trained()
    known = returned.terms.keys() <= sent.terms.keys() and returned.whole.keys() <= sent.whole.keys()
    if ours.keys() != theirs.keys() or not known:
        return f"other layers: {', '.join(sorted(map(str, ours.keys() ^ theirs.keys()))[:3])}"
    return next(
        (f"{name} {reason}" for name, tensor in theirs.items() if (reason := _unlike(tensor, ours[name]))), None
    )


def _differing_term(sent: Shard, returned: Update) -> str | None:
    """Return which layer's terms differ from those sent. Updates of an engine share the indices that were sent."""
    received: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, theirs in returned.terms.items():
        ours = sent.terms[layer]
        for part in ("indices", "multipliers"):
            if reason := _unlike(getattr(theirs, part), getattr(ours, part)):
                return f"{layer}.{part} {reason}"
        if ours.indices is not theirs.indices:
            received[layer] = ours.indices.cpu(), theirs.indices.cpu()
    if received and not torch.equal(*(torch.cat(indices) for indices in zip(*received.values(), strict=True))):
        layer = next(layer for layer, indices in received.items() if not torch.equal(*indices))
        return f"{layer}.indices are not those of the plan"
    return None


def _unlike(theirs: object, ours: Tensor) -> str | None:
    """Return how a tensor differs from ours in type, layout or shape, or None."""
    if not isinstance(theirs, Tensor) or theirs.is_meta or theirs.layout != ours.layout:
        return f"is a {type(theirs).__name__}, not a dense tensor with values"
    if theirs.dtype != ours.dtype:
        return f"is {theirs.dtype}, not {ours.dtype}"
    return None if theirs.shape == ours.shape else f"has shape {tuple(theirs.shape)}, not {tuple(ours.shape)}"
