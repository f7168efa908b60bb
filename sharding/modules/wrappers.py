"""Reach the modules and tensors inside DDP, `torch.compile`, activation checkpoints and FSDP2.

Wrappers put a part of their own into names: `blocks.0._orig_mod.fc.weight`. They can be around a model or around any of
its parts, and the server's need not be the client's. So this library knows modules and tensors by their names without
these parts.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

# What each class of wrappers calls the module in it. They are known by name: some would take long to import.
WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "ActivationWrapper": "_checkpoint_wrapped_module",  # torch's checkpoint_wrapper and offload_wrapper
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "AveragedModel": "module",  # torch.optim.swa_utils
}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers, nested in any order."""
    while (name := _inner_name(model)) is not None:
        model = cast(nn.Module, model._modules[name])
    return model


@cache
def _inner_name_of(kind: type[nn.Module]) -> str | None:
    """Return what wrappers of a class call the module in them; None for the class of other modules."""
    return next((WRAPPERS[each.__name__] for each in kind.__mro__ if each.__name__ in WRAPPERS), None)


def _inner_name(module: nn.Module) -> str | None:
    """Return what a wrapper calls the module in it; None for other modules."""
    name = _inner_name_of(cast(Any, type(module)))
    return None if name is None or module._modules.get(name) is None else name


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model like `nn.Module.named_modules`, but neither wrappers nor their parts of names."""
    waiting, seen = [("", model)], set()
    while waiting:
        name, module = waiting.pop()
        module = unwrap(module)
        if remove_duplicate and id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        begin = f"{name}." if name else ""
        waiting += [(begin + part, child) for part, child in reversed(module._modules.items()) if child is not None]


def get_submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a name that `named_modules` gives, or raise an AttributeError."""
    model = unwrap(model)
    for part in name.split(".") if name else ():
        child = model._modules.get(part)
        if child is None:
            raise AttributeError(f"{type(model).__name__} has no module {part}")
        model = unwrap(child)
    return model


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model like `nn.Module.named_parameters`, by names without the parts of wrappers."""
    return cast(Iterator[tuple[str, nn.Parameter]], _named_tensors(model, "_parameters", remove_duplicate))


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a model like `nn.Module.named_buffers`, by names without the parts of wrappers."""
    return _named_tensors(model, "_buffers", remove_duplicate=True)


def _named_tensors(model: nn.Module, kind: str, remove_duplicate: bool) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in named_modules(model, remove_duplicate):
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield key(prefix, name), tensor


def named_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of the module inside wrappers, by names without their parts, with the model's own tensors.

    What a wrapper counts for itself, as `AveragedModel` does, is left out.
    """
    model = unwrap(model)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if not any(_inner_name(module) for module in model.modules()):
        return state
    entries = ((_without_wrappers(model, name), entry) for name, entry in state.items())
    return {name: entry for name, entry in entries if name is not None}


def _without_wrappers(model: nn.Module, name: str) -> str | None:
    """Return the name of a state-dict entry without the parts of wrappers; None if it is a wrapper's own."""
    module: nn.Module | None = model
    parts = []
    for part in name.split("."):
        while module is not None and (inner := _inner_name(module)) is not None:
            if part in module._buffers or part in module._parameters:
                return None
            module = module._modules[inner]
            if part == inner:
                break
        else:  # not a wrapper's: some wrappers leave their part out themselves
            module = None if module is None else module._modules.get(part)
            parts.append(part)
    return ".".join(parts)


def without_wrappers(model: nn.Module) -> nn.Module:
    """Remove all wrappers in a model, in place, and return the module inside."""
    model = unwrap(model)
    for module in model.modules():
        module._modules.update({name: unwrap(part) for name, part in module._modules.items() if part is not None})
    return model


def rebuild_wrappers(model: nn.Module) -> None:
    """Let wrappers take note of what was replaced inside: DDP lists parameters, `torch.compile` keeps a function."""
    for module in model.modules():
        if _inner_name(module) is not None and type(module).__setstate__ is not nn.Module.__setstate__:
            module.__setstate__(module.__getstate__())


def key(layer: str, part: str) -> str:
    """Return the name of a part of a module; a module that is the whole model has no name."""
    return f"{layer}.{part}" if layer else part


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's `forward` is another than its class's; accelerate's hooks leave the class's there, bound."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


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
    return type(tensor).__name__ == "DTensor"
