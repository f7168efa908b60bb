"""A tensor that is computed where its values are used, such as the weight UΩVᵀ of a factorized layer.

Many models read `layer.weight.dtype` in every forward pass, and many tools write to `layer.weight.data`. A computed
tensor has shape, dtype and device without values. An operation on it computes the values first; views of it are
computed tensors too. Since no memory belongs to it, a write would be lost, and is an error. Gradients go to the tensors
that it is computed from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from sharding.errors import UserError
from sharding.modules.wrappers import is_distributed

Compute = Callable[..., Tensor]


def computed(shape: Sequence[int], compute: Compute, *sources: Tensor) -> Tensor:
    """Return `compute(*sources)`, which is computed at each use and not before.

    Tracers and compilers get the plain result. (They drop a product of which only the shape is read.)

    Args:
        shape: the shape of the result, which is contiguous and has the dtype and device of the first source.
        compute: a differentiable function.
        sources: the arguments of `compute`.
    """
    if _is_traced() or not all(type(source) in PLAIN or is_distributed(source) for source in sources):  # fake, …
        return _in_full_precision(compute, sources)
    result: Tensor = _Computed.apply(tuple(shape), compute, *sources)
    return result


def _is_traced() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _in_full_precision(compute: Compute, sources: Sequence[Tensor]) -> Tensor:
    with torch.autocast(sources[0].device.type, enabled=False):  # a dense weight has its own type under autocast too
        return compute(*sources)


class ComputesWeight(nn.Module):
    """A module with a property `weight` that is computed: nothing can be assigned to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            _refuse()
        super().__setattr__(name, value)

    def refuse_written_weight(self) -> None:
        """Raise a UserError if a weight was put past `__setattr__` into `_parameters` or `vars`: nothing reads it."""
        if "weight" in self._parameters or "weight" in vars(self):
            _refuse()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Refuse a dense weight, which torch would ignore with ``strict=False``."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}weight" in state_dict:
            args[-1].append(
                f"{prefix}weight is a dense layer's, and this one is a {type(self).__name__}; load it before the layer "
                "is replaced, or into sharding.merge(model)."
            )


class _Computed(torch.autograd.Function):
    """Connect a computed tensor to its sources; the gradient is that of `compute`, which runs again for it."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], compute: Compute, *sources: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*sources)
        like = torch.empty(shape, dtype=sources[0].dtype, device="meta")
        values = tuple(source.detach() for source in sources)
        return ComputedTensor(lambda: _in_full_precision(compute, values), like, sources[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed, again = ctx.needs_input_grad[2:], torch.is_grad_enabled()
        with torch.enable_grad(), torch.autocast(gradients[0].device.type, enabled=False):  # as in `forward`
            sources = [source.view_as(source) for source in ctx.saved_tensors]
            value = ctx.compute(*sources)
            wanted = [source for source, is_needed in zip(sources, needed, strict=True) if is_needed]
            made = iter(torch.autograd.grad(value, wanted, gradients[0], create_graph=again))
        return None, None, *(next(made) if is_needed else None for is_needed in needed)


class ComputedTensor(Tensor):
    """A tensor with a function that returns its values; see `computed`."""

    __slots__ = ("_values",)  # which ordinary tensors lack, so torch.utils.swap_tensors refuses
    _values: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Callable[[], Tensor], like: Tensor, device: torch.device) -> "ComputedTensor":
        """Make a tensor of the shape, strides and dtype of another one."""
        made: ComputedTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made._values = values
        torch._C._set_throw_on_mutable_data_ptr(made)  # for code below the dispatcher: DLPack, `apply_`
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the values; a view waits until its values are used."""
        kwargs = kwargs or {}
        if any(isinstance(target, cls) for target in _targets(func, args, kwargs)):
            _refuse()
        if func.is_view and isinstance(args[0], cls):
            return cls._view(func, args, kwargs)
        args, kwargs = tree_map_only(cls, lambda tensor: tensor._values(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _view(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a view, or a list of them, as computed tensors."""
        base = args[0]
        like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
        parts, structure = tree_flatten(func(like, *args[1:], **kwargs))

        def values_of(index: int) -> Callable[[], Tensor]:
            return lambda: tree_flatten(func(base._values(), *args[1:], **kwargs))[0][index]

        return tree_unflatten([cls(values_of(i), part, base.device) for i, part in enumerate(parts)], structure)

    # What follows does not pass through the dispatcher.

    def _refused(self, *_: object, **__: object) -> NoReturn:
        """Refuse a hook and a gradient, which would be lost with this tensor, and access to memory."""
        _refuse()

    requires_grad_ = register_hook = retain_grad = _refused
    untyped_storage = data_ptr = __dlpack__ = _refused
    requires_grad = property(lambda self: self.grad_fn is not None, _refused)
    grad = property(lambda self: None, _refused)  # the factors have gradients
    data = property(lambda self: self.detach(), _refused)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array that is read only."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def __format__(self, spec: str) -> str:
        return format(self.clone(), spec)

    def tolist(self) -> Any:
        """Return the values as lists."""
        return self.clone().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.clone())


def _targets(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[object]:
    """Yield the arguments that an operation writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            target = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from target if isinstance(target, list | tuple) else [target]


def _refuse() -> NoReturn:
    raise UserError(
        "the weight of a factorized layer is computed from its factors and has no memory, so a write would be lost; "
        "read a copy, weight.clone(), write to u and v, or call sharding.merge(model) first"
    )


PLAIN = (Tensor, nn.Parameter, ComputedTensor)
