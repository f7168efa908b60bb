"""Which dense layer is replaced by which factorized one. Anybody may add a pair."""

from torch import nn

from sharding.errors import UserError
from sharding.layers.base import FactorizedLayer

_REGISTRY: dict[type[nn.Module], type[FactorizedLayer]] = {}


def register(dense_type: type[nn.Module], factorized_type: type[FactorizedLayer]) -> None:
    """Let layers of `dense_type` be sharded as layers of `factorized_type`.

    Args:
        dense_type: a layer with a parameter `weight`.
        factorized_type: its factorized form, which says how the weight is seen as a matrix.

    Raises:
        UserError: `factorized_type` is no subclass of `FactorizedLayer`.
    """
    if not (isinstance(factorized_type, type) and issubclass(factorized_type, FactorizedLayer)):
        raise UserError(f"{factorized_type!r} is no FactorizedLayer; subclass sharding.FactorizedLayer to register it")
    _REGISTRY[dense_type] = factorized_type


def dense_types() -> tuple[type[nn.Module], ...]:
    """Return the kinds of layers that have a factorized form."""
    return tuple(_REGISTRY)


def factorized_type(layer: nn.Module) -> type[FactorizedLayer] | None:
    """Return the class that `layer` is factorized into, or None where there is none."""
    return _REGISTRY.get(type(layer))
