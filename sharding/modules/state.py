"""Decide which tensors of a model are sent, and under which names.

A tensor with several names (tied weights, a module registered twice) is sent once, under its first name. A complex
tensor is sent as pairs of real numbers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sharding.errors import UserError
from sharding.modules.wrappers import full_tensor, is_ordinary, key, named_buffers, named_parameters, named_state
from sharding.transport.serialize import TYPES

COUNTER = "num_batches_tracked"  # of a batch norm


def dense_state(model: nn.Module, sharded: Mapping[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is not sent as terms: all state but the factors and weights of sharded layers.

    Args:
        model: the server's.
        sharded: its layers whose terms are sent, by name.

    Returns:
        What each shard has, and the frozen parameters, which are sent once; in the memory of the model.

    Raises:
        UserError: an entry cannot be sent: a sparse tensor, or not a tensor, as in a quantized layer.
    """
    parts = ((*layer._parameters.items(), *layer._buffers.items()) for layer in sharded.values())
    seen = {id(tensor) for named in parts for name, tensor in named if name != "bias"}
    dense, frozen = {}, {}
    for name, tensor in named_state(model).items():
        _check_kind(name, tensor)
        if is_transmitted(name, tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                frozen[name] = as_real(full_tensor(tensor))
            else:
                dense[name] = as_real(full_tensor(tensor.detach()))
    return dense, frozen


def _check_kind(name: str, entry: object) -> None:
    if not isinstance(entry, Tensor) and name.rpartition(".")[2] != "_extra_state":
        raise UserError(
            f"{name} is a {type(entry).__name__}, which cannot be sent; quantize a model after training, "
            "and keep other state as extra state"
        )
    if isinstance(entry, Tensor) and not is_ordinary(entry):
        raise UserError(f"{name} is {type(entry).__name__}, which cannot be sent; quantize a model after training")
    if isinstance(entry, Tensor) and entry.layout != torch.strided:
        layout = str(entry.layout).removeprefix("torch.")
        raise UserError(f"{name} is {layout}, which cannot be sent; make it dense with to_dense()")
    if isinstance(entry, Tensor) and as_real(entry.resolve_conj()).dtype not in TYPES:
        raise UserError(f"{name} is {entry.dtype}, which cannot be sent; convert it to a type that safetensors knows")
    if isinstance(entry, Tensor):
        _check_memory(name, entry)


def _check_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that cannot be written in place, as averages are."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    for is_unsuitable, problem, remedy in (
        (tensor.is_conj() or tensor.is_neg(), "a lazy conjugate", "call resolve_conj().resolve_neg()"),
        (any(step == 0 and size > 1 for step, size in strides), "expanded, so that entries share memory", "clone it"),
        (tensor.is_inference(), "made in inference mode", "build the model outside of it"),
    ):
        if is_unsuitable:
            raise UserError(f"{name} is {problem}, and cannot be averaged in place; {remedy}")


def frozen_names(model: nn.Module, sharded: Mapping[str, nn.Module], dense: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of frozen sharded layers, and of integers: what a shard has and nobody trains or averages."""
    parameters = dict(named_parameters(model, remove_duplicate=False))
    layers = {
        key(layer, part): layer for layer, module in sharded.items() for part in module._parameters if part != "bias"
    }
    fixed = {layers[name] for name, parameter in parameters.items() if name in layers and not parameter.requires_grad}
    return frozenset(fixed | {name for name, tensor in dense.items() if not tensor.is_floating_point()})


def check_shapes(model: nn.Module) -> None:
    """Check that a model knows its shapes.

    Raises:
        UserError: it has lazy modules that have not seen a batch.
    """
    lazy = [name for name, part in (*named_parameters(model), *named_buffers(model)) if is_lazy(part)]
    if lazy:
        raise UserError(f"{', '.join(lazy)} of this {type(model).__name__} have no shape; run a batch through it first")


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view of pairs of real numbers, shape (…, 2); any other tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_transmitted(name: str, entry: object) -> bool:
    """Whether an entry of a state dict is sent: a tensor, except extra state and a batch norm's counter."""
    return isinstance(entry, Tensor) and name.rpartition(".")[2] not in ("_extra_state", COUNTER)


def batch_counters(model: nn.Module) -> list[Tensor]:
    """Return the counters of a model's batch norms. They are not sent: each client counts its own batches of a round.

    With ``momentum=None`` a batch norm averages over all batches that it has counted.
    """
    return [buffer for name, buffer in named_buffers(model) if name.rpartition(".")[2] == COUNTER]


def is_variance(name: str) -> bool:
    """Whether an entry of a state dict is a batch norm's variance; below 0 it makes outputs NaN."""
    return name.rpartition(".")[2] == "running_var"


def is_statistic(name: str) -> bool:
    """Whether an entry of a state dict is a batch norm's running mean or variance, which no optimizer trains."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")
