"""Reach the models and tensors inside DDP, `torch.compile` and FSDP2."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sharding.errors import UserError


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, `DataParallel` and `torch.compile`, nested in any order."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile's OptimizedModule
            model = inner
        else:
            return model


def refuse_scripted(model: nn.Module) -> None:
    """Check that a model's modules can be replaced.

    Raises:
        UserError: a part of it went through `torch.jit.script` or `torch.jit.trace`.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise UserError(
            "the layers of a scripted or traced model cannot be replaced; replace them first, then script the model"
        )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that FSDP2 has distributed, which is a collective call; return any other unchanged."""
    if not is_distributed(tensor):
        return tensor
    full: Tensor = cast(Any, tensor).full_tensor()
    return full


def distribute_like(tensor: Tensor, like: Any, *, copies: bool = False) -> Tensor:
    """Distribute a plain tensor like a parameter of FSDP2, so that one operation can use both.

    Args:
        tensor: all of it, the same on every process.
        like: a parameter; if it is not distributed, `tensor` is returned unchanged.
        copies: give every process the whole tensor, not its piece.
    """
    if not is_distributed(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor  # noqa: PLC0415 - heavy, loaded by now

    mesh = like.device_mesh
    if copies:
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)
    return distribute_tensor(tensor, mesh, like.placements)


def is_distributed(tensor: Any) -> bool:
    """Whether FSDP2 has distributed a tensor."""
    return hasattr(tensor, "device_mesh")
