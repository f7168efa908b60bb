"""Convolve through the trained terms of a layer and its frozen tail at once.

Each of the two convolutions has the channels of both: two convolutions take less time than four. Autograd would save
the tail dense until the backward pass, so it is dequantized in the forward pass, and once more in the backward pass, as
in `sharding.layers.frozen`. The tail has no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sharding.layers.frozen import CONVOLVE, call, compute_dtype
from sharding.matrices.quantization import dequantize


def convolution_with_tail(
    x: Tensor,
    filters: Tensor,
    matrix: Tensor,
    tail: tuple[Tensor, Tensor],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve (batch, channels, …) or (channels, …) through trained terms and frozen ones.

    The filters are V of the trained terms, (n·groups, channels/groups, *kernel), the matrix is their UΩ, (rows, n). The
    tail's stored factors are (m·groups, rows/groups) and (m·groups, columns). The rest is of the first convolution.
    """
    batched = x if x.dim() == filters.dim() else x.unsqueeze(0)
    geometry = (stride, padding, dilation, groups)
    y, _ = call(_ConvolutionWithTail, batched, filters, matrix, *tail, geometry)
    return y if x.dim() == filters.dim() else y.squeeze(0)


class _ConvolutionWithTail(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, filters: Tensor, matrix: Tensor, tail_u: Tensor, tail_v: Tensor, geometry: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        stride, padding, dilation, groups = geometry
        dtype = compute_dtype(x)
        convolve = CONVOLVE[filters.dim() - 2]
        both = _filters_with_tail(filters.to(dtype), tail_v, groups)
        terms = convolve(x.to(dtype), both, None, stride, padding, dilation, groups)
        matrix = _matrix_with_tail(matrix.to(dtype), tail_u, groups)
        y = convolve(terms, as_filters(matrix, filters.dim() - 2), None, 1, 0, 1, groups)
        trained = terms.unflatten(1, (groups, -1))[:, :, : len(filters) // groups]  # the first of each group
        return y, trained.flatten(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.geometry = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, filters, matrix, tail_u, tail_v, terms = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        dims, dtype, count = filters.dim() - 2, grad.dtype, len(filters)
        x_cast, filters_cast, matrix_cast = (part.to(dtype) for part in (x, filters, matrix))
        ones, zeros = [1] * dims, [0] * dims
        spatial = (stride, padding, dilation, False, zeros, groups)
        pointwise = (ones, zeros, ones, False, zeros, groups)

        def gradients(grad: Tensor, x: Tensor, weight: Tensor, geometry: tuple[Any, ...], *mask: bool) -> Any:
            return torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, [*mask, False])

        transposed = stacked_terms(_matrix_with_tail(matrix_cast, tail_u, groups), groups)
        of_both = CONVOLVE[dims](grad, as_filters(transposed, dims), None, 1, 0, 1, groups)
        of_matrix = gradients(grad, terms, as_filters(matrix_cast, dims), pointwise, False, True)[1]
        both = _filters_with_tail(filters_cast, tail_v, groups)
        of_x, of_filters = gradients(of_both, x_cast, both, spatial, ctx.needs_input_grad[0], True)[:2]
        of_filters = of_filters.unflatten(0, (groups, -1))[:, : count // groups].flatten(0, 1)
        of_x = of_x if of_x is None else of_x.to(x.dtype)
        return of_x, of_filters.to(filters.dtype), of_matrix.flatten(1).to(matrix.dtype), None, None, None


def _filters_with_tail(filters: Tensor, stored: Tensor, groups: int) -> Tensor:
    """Return the filters of trained and frozen terms, group by group: ((n + m)·groups, channels/groups, *kernel)."""
    frozen = dequantize(stored, filters.shape[1:].numel(), filters.dtype).view(-1, *filters.shape[1:])
    return torch.cat([part.unflatten(0, (groups, -1)) for part in (filters, frozen)], dim=1).flatten(0, 1)


def _matrix_with_tail(matrix: Tensor, stored: Tensor, groups: int) -> Tensor:
    """Return UΩ of trained and frozen terms, (rows, n + m)."""
    frozen = stacked_terms(dequantize(stored, len(matrix) // groups, matrix.dtype), groups)
    return torch.cat([matrix, frozen], dim=1)


def as_filters(matrix: Tensor, dims: int) -> Tensor:
    """Return a matrix as the filters of a 1×1 convolution, shape (*matrix, 1, …)."""
    return matrix[(..., *(None for _ in range(dims)))]


def stacked_terms(factor: Tensor, blocks: int) -> Tensor:
    """Return the terms of every block as rows: (blocks·columns, n) to (blocks·n, columns), or back to columns."""
    return factor.mT if blocks == 1 else factor.unflatten(0, (blocks, -1)).mT.flatten(0, 1)
