"""A frozen matrix in few bits, and its products, without keeping it dense.

Autograd would save the dense weight until the backward pass, and so the model of a step would be dense after all. Here
the weight is dequantized in the forward pass, and once more in the backward pass, each time for one layer. The gradient
flows to the input only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sharding.matrices.quantization import dequantize, is_stored, split_terms, stored_length

CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSE: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
torch.fx.wrap("dequantize")  # a tracer does not know the format of the rows that `select` takes


@dataclass(frozen=True)
class StoredMatrix:
    """A frozen matrix in a format of `sharding.matrices.quantization`, stored whole or by the factors of its terms.

    Attributes:
        stored: the matrix, a row for each of its rows; or factors, a row for each term of each block, as
            `quantize_terms` stores them.
        rows: the number of rows of a block.
        columns: the number of columns of a block.
        blocks: the number of blocks of the matrix.
        by_terms: whether `stored` has factors.
    """

    stored: Tensor
    rows: int
    columns: int
    blocks: int
    by_terms: bool

    @property
    def is_valid(self) -> bool:
        """Whether the stored tensor is one of a matrix of this shape."""
        if not is_stored(self.stored):
            return False
        (count, length), columns = self.stored.shape[:2], stored_length(self.stored, self.columns)
        if self.by_terms:
            return count % self.blocks == 0 and length == stored_length(self.stored, self.rows) + columns
        return (count, length) == (self.blocks * self.rows, columns)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, shape (blocks·rows, columns)."""
        if not self.by_terms:
            return dequantize(self.stored, self.columns, dtype)
        u, v = (side.unflatten(0, (self.blocks, -1)) for side in self.factors(dtype))
        return (u.mT @ v).flatten(0, 1)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors of a matrix that is stored by them, (blocks·n, rows) and (blocks·n, columns)."""
        u, v = split_terms(self.stored, self.rows)
        return dequantize(u, self.rows, dtype), dequantize(v, self.columns, dtype)

    def linear(self, x: Tensor, transposed: bool = False) -> Tensor:
        """Return x Wᵀ, shape (..., rows), for the matrix W of one block; or x W, shape (..., columns)."""
        if not self.by_terms:
            return frozen_linear(x, self.stored, self.columns, transposed)
        u, v = split_terms(self.stored, self.rows)
        first, last = ((u, self.rows), (v, self.columns)) if transposed else ((v, self.columns), (u, self.rows))
        return frozen_linear(frozen_linear(x, *first), *last, transposed=True)

    def select(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows with these numbers (n,) of a matrix of one block, shape (n, columns)."""
        if not self.by_terms:
            return dequantize(self.stored[rows], self.columns, dtype)
        u, v = self.factors(dtype)
        return u[:, rows].mT @ v

    def transposed_convolution(self, x: Tensor, shape: Sequence[int], *geometry: Any) -> Tensor:
        """Return the transposed convolution of x with a weight of this shape; for the rest see `frozen_convolution`."""
        if not self.by_terms:
            return frozen_convolution(x, self.stored, shape, *geometry)
        u, v = split_terms(self.stored, self.rows)
        ones, zeros = [1] * (len(shape) - 2), [0] * (len(shape) - 2)
        terms = frozen_convolution(x, u, (len(u), self.rows, *ones), ones, zeros, ones, self.blocks)
        return frozen_convolution(terms, v, (len(v), *shape[1:]), *geometry)


# Whether a gradient is needed is not known to a tracer, which sees these as single steps.
@torch.fx.wrap
def frozen_linear(x: Tensor, stored: Tensor, columns: int, transposed: bool = False) -> Tensor:
    """Return x Rᵀ for a stored R (out, columns), or x R for one that is stored as (in, columns)."""
    if torch.is_grad_enabled() and x.requires_grad:
        return call(_Linear, x, stored, columns, transposed)
    return _Linear.forward(x, stored, columns, transposed)


@torch.fx.wrap
def frozen_convolution(
    x: Tensor,
    stored: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    """Convolve (batch, channels, …) or (channels, …) with a stored weight of this shape.

    `output_padding` is that of a transposed convolution; None for an ordinary one.
    """
    batched = x if x.dim() == len(shape) else x.unsqueeze(0)
    geometry = (tuple(shape), stride, padding, dilation, groups, output_padding)
    if torch.is_grad_enabled() and x.requires_grad:
        y = call(_Convolution, batched, stored, geometry)
    else:
        y = _Convolution.forward(batched, stored, geometry)
    return y if x.dim() == len(shape) else y.squeeze(0)


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, stored: Tensor, columns: int, transposed: bool) -> Tensor:
        weight = dequantize(stored, columns, compute_dtype(x))
        return x @ (weight if transposed else weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, stored, ctx.columns, ctx.transposed = inputs
        ctx.save_for_backward(stored)
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (stored,) = ctx.saved_tensors
        weight = dequantize(stored, ctx.columns, grad.dtype)
        return (grad @ (weight.mT if ctx.transposed else weight)).to(ctx.dtype), None, None, None


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, stored: Tensor, geometry: tuple[Any, ...]) -> Tensor:
        shape, stride, padding, dilation, groups, output_padding = geometry
        weight = _filters(stored, shape, compute_dtype(x))
        if output_padding is None:
            return CONVOLVE[len(shape) - 2](x, weight, None, stride, padding, dilation, groups)
        return TRANSPOSE[len(shape) - 2](x, weight, None, stride, padding, output_padding, groups, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, stored, ctx.geometry = inputs
        ctx.save_for_backward(stored)
        ctx.dtype, ctx.sizes = x.dtype, x.shape[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, stride, padding, dilation, groups, output_padding = ctx.geometry
        (stored,) = ctx.saved_tensors
        weight, dims = _filters(stored, shape, grad.dtype), len(shape) - 2
        if output_padding is None:
            geometry = zip(ctx.sizes, grad.shape[2:], shape[2:], stride, padding, dilation, strict=True)
            extra = [size - (out - 1) * step + 2 * pad - far * (k - 1) - 1 for size, out, k, step, pad, far in geometry]
            x = TRANSPOSE[dims](grad, weight, None, stride, padding, extra, groups, dilation)
        else:
            x = CONVOLVE[dims](grad, weight, None, stride, padding, dilation, groups)
            for axis, size in enumerate(ctx.sizes, 2):  # longer where the output padding is the stride or more
                x = x.narrow(axis, 0, size)
        return x.to(ctx.dtype), None, None


def _filters(stored: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return dequantize(stored, prod(shape[1:]), dtype).reshape(shape)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a product with x is computed in, which autocast may decide."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def call(function: type[torch.autograd.Function], *args: object) -> Any:
    """Apply a function that autograd knows, which has no types; `torch.jit.trace` sees its steps, not Python."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return (function.forward if tracing else function.apply)(*args)
