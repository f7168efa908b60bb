"""Where tensors have a NaN or Inf."""

from collections.abc import Mapping

import torch
from torch import Tensor


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
