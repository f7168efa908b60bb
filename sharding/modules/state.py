"""Decide which tensors of a model are sent, and under which names.

A tensor with several names (tied weights, a module registered twice) is sent once, under its first name. A complex
tensor is sent as pairs of real numbers.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from sharding.matrices.values import as_real
from sharding.modules.wrappers import full_tensor, key, named_buffers, named_parameters, named_state

COUNTER = "num_batches_tracked"  # of a batch norm


def whole_state(model: nn.Module, sharded: Mapping[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is not sent as terms: all state but the factors and weights of sharded layers.

    Args:
        model: the server's.
        sharded: the layers whose terms are sent, by name.

    Returns:
        What each shard has, and the frozen parameters, which are sent once; in the memory of the model.
    """
    parts = ((*layer._parameters.items(), *layer._buffers.items()) for layer in sharded.values())
    seen = {id(tensor) for named in parts for name, tensor in named if name != "bias"}
    dense, frozen = {}, {}
    for name, tensor in named_state(model).items():
        if is_transmitted(name, tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                frozen[name] = as_real(full_tensor(tensor))
            else:
                dense[name] = as_real(full_tensor(tensor.detach()))
    return dense, frozen


def fixed_names(model: nn.Module, sharded: Mapping[str, nn.Module], dense: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of frozen sharded layers, and of integers: what a shard has and nobody trains or averages."""
    parameters = dict(named_parameters(model, remove_duplicate=False))
    layers = {
        key(layer, part): layer for layer, module in sharded.items() for part in module._parameters if part != "bias"
    }
    fixed = {layers[name] for name, parameter in parameters.items() if name in layers and not parameter.requires_grad}
    return frozenset(fixed | {name for name, tensor in dense.items() if not tensor.is_floating_point()})


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
