"""Compose a weight from its factors only when code computes with it.

Much code reads only the dtype or device of `layer.weight`. Composing UΩVᵀ of a large layer for that would be a waste.
So `layer.weight` is a tensor that knows its metadata. `F.linear` uses its factors; all other functions use the composed
weight. Writes would be lost, so they raise an error. Views are views of a composed copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from sharding.errors import UserError

# Attributes that need no values, and methods with the same meaning.
ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "is_leaf", "grad", "itemsize", "nbytes"),
)
METHODS = (
    *("size", "dim", "numel", "nelement", "ndimension", "element_size", "stride", "is_contiguous", "storage_offset"),
    *("is_floating_point", "is_complex", "get_device", "is_pinned", "__len__", "__hash__"),
)


def _getter(name: str) -> Any:
    """Return the function by which torch reads a tensor's attribute."""
    return getattr(Tensor, name).__get__


METADATA = frozenset(
    [_getter(name) for name in ATTRIBUTES]
    + [getattr(Tensor, name) for name in METHODS]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)
DETACHING = (_getter("data"), Tensor.detach, torch.detach)
TRAINS = _getter("requires_grad")
WRITES = frozenset({"__setitem__", "__set__", "set_"})


Factors = Any  # a `FactorizedLayer`, whose module imports this one


class LazyWeight(Tensor):
    """The weight of a factorized layer, yet to be composed."""

    _layer: Factors
    _attached: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer calls that need no values; compose for all others."""
        kwargs = kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()), None)  # nn.init.normal_ names its tensor
        if LazyWeight in map(type, tree_leaves(first)) and (writing := _writing(func, kwargs)):
            raise refused(writing)
        if type(first) is LazyWeight:
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func == TRAINS:
                return first._attached and (first._layer.u.requires_grad or first._layer.v.requires_grad)
            if func in DETACHING:
                return _wrap(first._layer, False)
        if LazyWeight in map(type, tree_leaves(kwargs.get("out"))):
            raise refused("out=")
        if func is F.linear and len(args) > 1 and _is_matrix(args[1]) and type(first) is not LazyWeight:
            layer = args[1]._layer
            return F.linear(args[0] @ layer.v * layer.multipliers, layer.u, *args[2:], **kwargs)
        args, kwargs = tree_map(_composed, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compose for kernels that torch calls without `__torch_function__`."""
        args, kwargs = tree_map(lambda value: _composed(value, False), (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the `repr` of the composed weight."""
        return repr(_composed(self))


def _writing(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of a function that writes to its first argument, or to tensors in it; else None."""
    name = getattr(func, "__name__", "")
    writes = name in WRITES or (name.endswith("_") and not name.startswith("__"))
    return name if writes else f"{name}(inplace=True)" if kwargs.get("inplace") else None


def refused(what: str) -> UserError:
    """Return the error for a write to the weight."""
    return UserError(
        f"{what} would write to the weight of a factorized layer, which is the product of u, multipliers and v; "
        "write to these, or merge the model first"
    )


def lazy_weight(layer: Factors) -> Tensor:
    """Return the layer's weight, composed if torch records the computation (compile, export, trace)."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return layer.matrix().view(layer.weight_shape)
    return _wrap(layer, True)


def _wrap(layer: Factors, attached: bool) -> LazyWeight:
    lazy: LazyWeight = torch.Tensor._make_wrapper_subclass(
        LazyWeight, layer.weight_shape, dtype=layer.u.dtype, device=layer.u.device
    )
    lazy._layer, lazy._attached = layer, attached
    return lazy


def _composed(value: Any, attached: bool = True) -> Any:
    """Compose a lazy weight; return anything else unchanged."""
    if type(value) is not LazyWeight:
        return value
    composed = value._layer.matrix().view(value._layer.weight_shape)
    return composed if attached and value._attached else composed.detach()


def _is_matrix(weight: object) -> bool:
    """Whether a product with this weight can use its factors."""
    return type(weight) is LazyWeight and weight._attached and len(weight._layer.weight_shape) == 2
