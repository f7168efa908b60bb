"""Copies of models, those included whose layers hold tensors that they have computed."""

from collections.abc import Iterator, Mapping
from copy import deepcopy

from torch import Tensor, nn


def copied(model: nn.Module, instead: Mapping[int, object] | None = None) -> nn.Module:
    """Return a copy of a model, with other objects in the place of some of its own.

    Args:
        model: it stays as it is.
        instead: what takes the place of an object, by its `id`.
    """
    # What a layer has computed (pruned, normalized) torch does not copy.
    computed = {id(tensor): tensor.detach().clone() for tensor in tensors(model) if not tensor.is_leaf}
    return deepcopy(model, computed | dict(instead or {}))


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a model's modules hold: parameters, buffers and plain attributes."""
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        yield from (tensor for tensor in held if isinstance(tensor, Tensor))
