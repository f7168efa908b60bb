"""Copy models, with their values or on the meta device, and give a copy values."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.matrices.values import as_real
from sharding.modules.wrappers import (
    distribute_like,
    named_buffers,
    named_modules,
    named_parameters,
    rebuild_wrappers,
    unwrap,
)


def copied(model: nn.Module, instead: Mapping[int, object] | None = None) -> nn.Module:
    """Return a copy of a model, which FSDP2 does not hold, with other objects in place of those of these `id`s.

    Raise a UserError if a module holds something that Python cannot copy, such as a lock.
    """
    # torch copies neither computed tensors (pruned, normalized) nor sparse ones.
    special = [tensor for tensor in tensors(model) if not tensor.is_leaf or tensor.layout != torch.strided]
    try:
        return deepcopy(model, {id(tensor): _clone(tensor) for tensor in special} | dict(instead or {}))
    except (TypeError, RuntimeError) as error:
        raise UserError(f"this {type(model).__name__} cannot be copied: {error}; keep that outside of it") from error


def meta_copy(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a copy of a model with parameters on the `meta` device, in which any layer can be replaced.

    Its weights are not copied, and neither are the `shared` buffers.
    """
    model = unwrap(model)
    instead: dict[int, object] = {id(parameter): meta_parameter(parameter) for parameter in model.parameters()}
    return copied(model, instead | {id(buffer): buffer for buffer in shared})


def meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape and kind on the `meta` device."""
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def load(model: nn.Module, values: Iterable[tuple[Tensor, Tensor]], copy: bool) -> None:
    """Give parameters and buffers of a model values, in place; what is frozen stays frozen.

    Args:
        model: a model, plain or wrapped; its parameters and buffers on the `meta` device get memory where the value is.
        values: pairs of an entry of the model and its value, as real numbers, in any type.
        copy: False lets entries on the `meta` device be the values themselves where the type is the same.
    """
    new = dict[int, Tensor]()
    for entry, value in values:
        if not entry.is_meta:
            target = as_real(entry)
            target.copy_(distribute_like(value.to(target.device, target.dtype), target))
        elif value.dtype == entry.dtype and not copy:
            new[id(entry)] = value
        else:
            new[id(entry)] = torch.empty_strided(entry.shape, entry.stride(), dtype=entry.dtype, device=value.device)
            as_real(new[id(entry)]).copy_(value)
    if new:
        fill(model, new)


def fill(model: nn.Module, values: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers of a model, by their `id`, in place; what is frozen stays frozen."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for entries in cast(list[dict[str, Any]], [module._parameters, module._buffers]):
            for key, entry in entries.items():
                if (value := values.get(id(entry))) is not None:
                    new = nn.Parameter(value, entry.requires_grad) if isinstance(entry, nn.Parameter) else value
                    entries[key] = made.setdefault(id(entry), new)  # one for all names of a tied one
    rebuild_wrappers(model)


def check_has_values(model: nn.Module, source: object) -> None:
    """Raise a UserError if a parameter or buffer is on the meta device; it names `source`, where values come from."""
    empty = [name for name, part in (*named_parameters(model), *named_buffers(model)) if part.is_meta]
    if empty:
        raise UserError(
            f"{source} has no values for {', '.join(empty)}, which the model has on the meta device; build it in "
            "`with sharding.init_empty():`, which leaves buffers real, or give a structure with values"
        )


def _clone(tensor: Tensor) -> Tensor:
    values = tensor.detach().clone()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a model's modules hold: parameters, buffers and attributes, also in containers."""
    for module in model.modules():
        yield from _tensors_in(vars(module))


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def replace_modules(model: nn.Module, replacements: Mapping[int, nn.Module]) -> nn.Module:
    """Replace modules, given by their `id`, wherever they are registered."""
    for parent in list(model.modules()):
        for name, module in parent._modules.items():
            if id(module) in replacements:
                parent._modules[name] = replacements[id(module)]
    rebuild_wrappers(model)
    _warn_of_references(model, replacements)
    return replacements.get(id(model), model)


def _warn_of_references(model: nn.Module, replaced: Mapping[int, nn.Module]) -> None:
    """Warn where a module that was replaced is still in a plain attribute, list or dictionary of another."""
    for name, parent in named_modules(model):
        for attribute, value in vars(parent).items():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            if any(id(part) in replaced for part in values):
                where = f"{name}.{attribute}" if name else attribute
                warnings.warn(
                    f"{where} still refers to a layer that was replaced, and would compute with its old weights; "
                    "keep layers in nn.ModuleList or nn.ModuleDict only",
                    stacklevel=5,
                )
