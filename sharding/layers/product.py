"""The two products of a factorized linear layer, with gradients of the factors that a CPU computes fast.

The gradient of a factor is a tall product, aᵀb of a (batch, rows) and b (batch, n). Where it is larger than a core's
cache, CPU libraries take up to three times as long for it as for the same work in strips of rows. So here it is
computed in strips, by one batched product. Small layers, single samples, other devices and compiled code have nothing
to gain, and go without.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

STRIP = 256  # rows
LARGE = 2**19  # numbers: a gradient that no longer fits a core's cache


def through_terms(x: Tensor, inner: Tensor, multipliers: Tensor, outer: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return outer Ω innerᵀ x + bias, for x of shape (..., in), inner (in, n), multipliers (n,) and outer (out, n)."""
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        made = F.linear(x @ inner * multipliers, outer, bias)
    else:  # which torch.jit.script does not read
        made = expand(contract(x, inner) * multipliers, outer, bias)
    return made


def contract(x: Tensor, factor: Tensor) -> Tensor:
    """Return x·factor, shape (..., n), for x of shape (..., in) and a factor (in, n)."""
    contracted: Tensor = _Contract.apply(x, factor) if gains(x, factor) else x @ factor
    return contracted


def expand(terms: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """Return terms·factorᵀ + bias, shape (..., out), for terms of shape (..., n) and a factor (out, n)."""
    if not gains(terms, factor):
        return F.linear(terms, factor, bias)
    expanded: Tensor = _Expand.apply(terms, factor)
    return expanded if bias is None else expanded + bias


def gains(x: Tensor, factor: Tensor) -> bool:
    """Whether the gradient of a factor is worth strips, and Python is there to say so when it is computed."""
    return (
        type(x) is Tensor  # not what stands for one in torch.fx, nor one in pieces
        and torch._C._get_tracing_state() is None
        and x.device.type == "cpu"
        and not x.is_nested
        and factor.numel() >= LARGE
        and factor.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def tall_product(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀb, shape (rows, n), for a of shape (..., rows) and b (..., n)."""
    a, b = a[None].flatten(0, -2), b[None].flatten(0, -2)
    if len(b) < 4 or a.shape[1] % STRIP:
        return a.mT @ b
    strips = a.unflatten(1, (-1, STRIP)).permute(1, 2, 0)
    return torch.bmm(strips, b.expand(len(strips), -1, -1)).flatten(0, 1)


class _Product(Function):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


class _Contract(_Product):
    @staticmethod
    def forward(x: Tensor, factor: Tensor) -> Tensor:
        return x @ factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, factor = ctx.saved_tensors
        of_x, of_factor = ctx.needs_input_grad
        return F.linear(gradient, factor) if of_x else None, tall_product(x, gradient) if of_factor else None

    @staticmethod
    def jvp(ctx: Any, x_change: Tensor, factor_change: Tensor) -> Tensor:
        x, factor = ctx.saved_tensors
        return x_change @ factor + x @ factor_change


class _Expand(_Product):
    @staticmethod
    def forward(terms: Tensor, factor: Tensor) -> Tensor:
        return F.linear(terms, factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        terms, factor = ctx.saved_tensors
        of_terms, of_factor = ctx.needs_input_grad
        return gradient @ factor if of_terms else None, tall_product(gradient, terms) if of_factor else None

    @staticmethod
    def jvp(ctx: Any, terms_change: Tensor, factor_change: Tensor) -> Tensor:
        terms, factor = ctx.saved_tensors
        return F.linear(terms_change, factor) + F.linear(terms, factor_change)
