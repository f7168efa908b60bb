"""Register which factorized layer replaces which dense one."""

from collections.abc import Mapping

from torch import nn

from sharding.errors import UserError
from sharding.layers.base import FactorizedLayer
from sharding.layers.linear import FactorizedTransposedLinear, is_transposed_linear
from sharding.matrices.quantization import Format
from sharding.modules.copies import replace_modules
from sharding.modules.wrappers import has_own_forward, named_modules
from sharding.validation import typed

_REGISTRY: dict[type[nn.Module], type[FactorizedLayer]] = {}
_ON_DEMAND: set[type[nn.Module]] = set()
# The methods that determine a layer's function: a subclass that changes none of them can be replaced like its base.
BEHAVIOR = ("__call__", "forward", "_conv_forward", "_output_padding", "weight")


@typed
def register_layer(
    dense_type: type[nn.Module], factorized_type: type[FactorizedLayer], on_demand: bool = False
) -> None:
    """Let layers of `dense_type`, and of subclasses that inherit its `forward`, be sharded as `factorized_type`.

    Args:
        dense_type: a layer with a parameter `weight`.
        factorized_type: the layer's factorized form.
        on_demand: whether such layers stay dense unless `also=` matches them.

    Raises:
        UserError: `factorized_type` is not a subclass of `FactorizedLayer`, or `dense_type` of `nn.Module`.
    """
    if not issubclass(dense_type, nn.Module):
        raise UserError(f"{dense_type!r} is not a module; register a subclass of nn.Module")
    if not issubclass(factorized_type, FactorizedLayer):
        raise UserError(
            f"{factorized_type!r} is not a FactorizedLayer; register a subclass of sharding.FactorizedLayer"
        )
    _REGISTRY[dense_type] = factorized_type
    (_ON_DEMAND.add if on_demand else _ON_DEMAND.discard)(dense_type)


def factorized_type(layer: nn.Module) -> type[FactorizedLayer] | None:
    """Return the class that `layer` is factorized into, or None if that would compute something else."""
    kind = base_of(layer)
    if kind is None:
        return FactorizedTransposedLinear if is_transposed_linear(layer) else None
    inherits = all(getattr(type(layer), name, None) is getattr(kind, name, None) for name in BEHAVIOR)
    return _REGISTRY[kind] if inherits and not has_own_forward(layer) else None


def base_of(layer: nn.Module) -> type[nn.Module] | None:
    """Return the registered class that a layer inherits from, whether or not it can be replaced."""
    return next((kind for kind in type(layer).__mro__ if kind in _REGISTRY), None)


def is_affine(layer: nn.Module) -> bool:
    """Whether layers of this kind are sharded by default."""
    kind = base_of(layer)
    return is_transposed_linear(layer) if kind is None else kind not in _ON_DEMAND


def is_on_demand(layer: nn.Module) -> bool:
    """Whether layers of this kind are sharded only if `also=` matches them."""
    return base_of(layer) in _ON_DEMAND


def factorize_empty(
    model: nn.Module, terms: Mapping[str, int], residuals: Mapping[str, Format] | None = None
) -> nn.Module:
    """Replace each named layer by a factorized one without values, in place.

    Nothing is decomposed. If the model is on the `meta` device, no dense weight is ever made.

    Args:
        model: any module.
        terms: n by layer name.
        residuals: the formats of the residuals, by the names of the layers that have one.

    Raises:
        UserError: a name is not a layer that can be factorized, or a number of terms is outside 1…N.
    """
    layers = dict(named_modules(model, remove_duplicate=False))
    missing = [name for name in terms if name not in layers]
    if missing:
        raise UserError(f"the model has no layer {', '.join(missing)}")
    formats = residuals or {}
    empty = {
        id(layers[name]): factorized_kind(name, layers[name], formats.get(name))(layers[name], n, formats.get(name))
        for name, n in terms.items()
    }
    return replace_modules(model, empty)


def factorized_kind(name: str, layer: nn.Module, residual_format: Format | None) -> type[FactorizedLayer]:
    """Return the class that replaces a layer; the message of an error calls the layer `name`.

    Raise a UserError if there is none, or if it cannot add a residual and one is asked for.
    """
    kind = factorized_type(layer)
    if kind is None:
        raise UserError(f"layer {name} is a {type(layer).__name__}, which has no factorized form")
    if residual_format is not None and not kind.adds_residual:
        raise UserError(
            f"layer {name} cannot have a residual: the forward of {kind.__name__} would have to add it, and the class "
            "to set adds_residual = True; leave the layer out with skip, or use residual_format=None"
        )
    return kind
