"""What may be wrong with a client's update, told in a few words. Nothing that comes from a client is trusted.

An update must be of the plan that the server made: its tensors are compared with those of the shard that was sent,
their values last. What the multipliers are is not looked at: they do not enter the average.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sharding.compression import EXACT
from sharding.shard import Shard

NOTHING = "nothing returned"


def find_fault(sent: Shard, returned: object) -> str | None:
    """Say what is wrong with a client's update, or None if it can be averaged. Never raises."""
    misfit = find_misfit(sent, returned)
    if misfit is not None or not isinstance(returned, Shard):
        return misfit
    name = find_nonfinite(returned.trained())
    return None if name is None else f"NaN or Inf in {name}"


def find_misfit(sent: Shard, returned: object) -> str | None:
    """Say why this is no update of the shard that was sent, whatever its values, or None. Never raises."""
    if returned is None:
        return NOTHING
    if not isinstance(returned, Shard):
        return f"a {type(returned).__name__}, not a shard"
    try:
        return _other_kind(sent, returned) or _differing_tensor(sent, returned) or _differing_term(sent, returned)
    except Exception as error:  # of parts that are no tensors, or not of one device: whatever it is, it is no update
        return f"no shard that can be read: {type(error).__name__}: {error}"


def find_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that has a NaN or Inf; the tensors are looked at in one go."""
    if not tensors:
        return None
    home = next(iter(tensors.values())).device
    values = [_summable(tensor) for tensor in tensors.values()]
    sums = torch.stack([tensor.sum().double().to(home) for tensor in values])
    if bool(sums.isfinite().all()):  # a NaN or Inf would show in its sum, and one pass finds that out
        return None
    finite = [bool(tensor.isfinite().all()) for tensor in values]  # a sum may overflow by itself
    return next((name for name, fine in zip(tensors, finite, strict=True) if not fine), None)


def _summable(tensor: Tensor) -> Tensor:
    """Return the same numbers in a type that has a sum: float8 has none."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _other_kind(sent: Shard, returned: Shard) -> str | None:
    """Say what shows that it is no update of this shard before any tensor is looked at."""
    if returned.plan != sent.plan:
        return f"an update of the plan {str(returned.plan)[:40]!r}, not of {sent.plan!r}"
    if returned.wire != sent.wire:
        return f"an update in {str(returned.wire)[:40]}, not in {sent.wire}"
    if returned.changes != (sent.wire != EXACT):
        return f"values, not the changes that {sent.wire} carries back" if sent.wire != EXACT else "changes, not values"
    if returned.frozen:
        return f"what is frozen has come back: {', '.join(sorted(map(str, returned.frozen))[:3])}"
    return None


def _differing_tensor(sent: Shard, returned: Shard) -> str | None:
    """Say which tensor that is averaged is missing, too much, or not of the kind of ours."""
    ours, theirs = sent.trained(), returned.trained()
    known = returned.terms.keys() <= sent.terms.keys() and returned.dense.keys() <= sent.dense.keys()
    if ours.keys() != theirs.keys() or not known:
        return f"other layers: {', '.join(sorted(map(str, ours.keys() ^ theirs.keys()))[:3])}"
    return next((f"{name} {why}" for name, tensor in theirs.items() if (why := _unlike(tensor, ours[name]))), None)


def _differing_term(sent: Shard, returned: Shard) -> str | None:
    """Say which layer's terms are not those that were sent. An engine's updates share the indices that were sent."""
    travelled: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, theirs in returned.terms.items():
        ours = sent.terms[layer]
        for part in ("indices", "multipliers"):
            if why := _unlike(getattr(theirs, part), getattr(ours, part)):
                return f"{layer}.{part} {why}"
        if ours.indices is not theirs.indices:
            travelled[layer] = ours.indices.cpu(), theirs.indices.cpu()
    if travelled and not torch.equal(*(torch.cat(indices) for indices in zip(*travelled.values(), strict=True))):
        layer = next(layer for layer, indices in travelled.items() if not torch.equal(*indices))
        return f"{layer}.indices are not those of the plan"
    return None


def _unlike(theirs: object, ours: Tensor) -> str | None:
    """Say in what a tensor is not of the kind of ours."""
    if not isinstance(theirs, Tensor) or theirs.is_meta or theirs.layout != ours.layout:
        return f"is no tensor of plain values but a {type(theirs).__name__}"
    if theirs.dtype != ours.dtype:
        return f"is {theirs.dtype}, not {ours.dtype}"
    return None if theirs.shape == ours.shape else f"has shape {tuple(theirs.shape)}, not {tuple(ours.shape)}"
