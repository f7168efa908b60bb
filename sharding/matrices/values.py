"""The values of tensors: find NaN and Inf, see complex ones as real, compute with types that have no arithmetic."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view of pairs of real numbers, shape (…, 2); any other tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def find_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that has a NaN or Inf; all tensors are checked at once."""
    if not tensors:
        return None
    device = next(iter(tensors.values())).device
    values = [computable(as_real(tensor)) for tensor in tensors.values()]
    sums = torch.stack([tensor.sum().double().to(device) for tensor in values])
    if bool(sums.isfinite().all()):  # a NaN or Inf shows in the sum, which takes one pass
        return None
    finite = [bool(tensor.isfinite().all()) for tensor in values]  # a sum may overflow by itself
    return next((name for name, fine in zip(tensors, finite, strict=True) if not fine), None)


def first_flagged(flags: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return the first name whose flag, a boolean scalar, is set; all are read in one transfer from their device."""
    if not flags:
        return None
    device = flags[0][1].device
    values = torch.stack([flag.to(device) for _, flag in flags]).tolist()
    return next((name for (name, _), is_set in zip(flags, values, strict=True) if is_set), None)


def computable(tensor: Tensor) -> Tensor:
    """Return the same numbers in a type that has arithmetic; float8 has none."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def difference(value: Tensor, sent: Tensor) -> Tensor:
    """Return value − sent in the type that was sent, which may have no arithmetic."""
    return (computable(value) - computable(sent)).to(sent.dtype)
