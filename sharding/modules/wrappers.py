"""Models and tensors as DDP, `torch.compile` and FSDP2 wrap them, and what a shard knows by name inside."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sharding.errors import UserError


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, `DataParallel` and `torch.compile`, in whatever order they were put around it."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile's OptimizedModule
            model = inner
        else:
            return model


def refuse_scripted(model: nn.Module) -> None:
    """Make sure that a model's modules can be replaced.

    Raises:
        UserError: some of it went through `torch.jit.script` or `torch.jit.trace`.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise UserError(
            "the layers of a scripted or traced model cannot be replaced; script what is made of the original"
        )


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that FSDP2 may hold in pieces, a collective call then; any other as it is."""
    if not is_distributed(tensor):
        return tensor
    full: Tensor = cast(Any, tensor).full_tensor()
    return full


def spread_like(tensor: Tensor, like: Any, *, copies: bool = False) -> Tensor:
    """Return a plain tensor distributed as FSDP2 has `like`, so that both meet in one operation.

    Args:
        tensor: all of it, the same on every process.
        like: a parameter; where it is not distributed `tensor` comes back as it is.
        copies: give every process the whole of it, not its piece.
    """
    if not is_distributed(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor  # noqa: PLC0415 - heavy, loaded by now

    mesh = like.device_mesh
    if copies:
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)
    return distribute_tensor(tensor, mesh, like.placements)


def is_distributed(tensor: Any) -> bool:
    """Tell whether FSDP2 holds a tensor in pieces."""
    return hasattr(tensor, "device_mesh")
