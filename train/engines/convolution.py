"""Convolutions of G clients, each with filters of its own.

Three ways compute the same: one convolution whose groups are the clients, one after the other, and a matrix product
over unfolded patches. Which is fastest depends on the shapes, by a factor; see `choices`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from train.engines.choices import Choices, convolution_way, fastest


class Geometry(NamedTuple):
    """Of a convolution with zero padding, each for (height, width)."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def convolve(x: Tensor, filters: Tensor, geometry: Geometry, choices: Choices) -> Tensor:
    """Convolve x (G·B, in, H, W) with filters (G, out, in, kh, kw) and return (G·B, out, H', W')."""
    if filters.shape[-2:] == (1, 1) and geometry.padding == (0, 0):
        down, right = geometry.stride
        return pointwise(x[:, :, ::down, ::right], filters.flatten(2), None)
    batch = (len(x) // len(filters), *x.shape[1:])
    subject = f"{batch} * {tuple(filters.shape[1:])} {tuple(geometry)}"
    if subject not in choices.convolutions:
        choices.convolutions[subject] = _choose(x, filters, geometry, choices.timed)
    return WAYS[choices.convolutions[subject]](x, filters, geometry)


def pointwise(x: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve 1×1, as a matrix product per client.

    Args:
        x: (G·B, in, H, W); no copy is made of it where its channels are innermost.
        matrices: (G, out, in).
        bias: (G, out), or None.

    Returns:
        (G·B, out, H, W), with channels innermost.
    """
    return affine(x.permute(0, 2, 3, 1), matrices.mT, bias).permute(0, 3, 1, 2)


def affine(x: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
    """Return x·M + b for each client: x (G·B, …, in), M (G, in, out), b (G, out) or None -> (G·B, …, out)."""
    rows = x.reshape(len(matrices), -1, x.shape[-1])
    y = torch.bmm(rows, matrices) if bias is None else torch.baddbmm(bias[:, None], rows, matrices)
    return y.view(*x.shape[:-1], -1)


def _grouped(x: Tensor, filters: Tensor, geometry: Geometry) -> Tensor:
    clients = len(filters)
    side_by_side = x.unflatten(0, (clients, -1)).transpose(0, 1).flatten(1, 2)
    y = F.conv2d(side_by_side, filters.flatten(0, 1), None, *geometry, groups=clients)
    return y.unflatten(1, (clients, -1)).transpose(0, 1).flatten(0, 1)


def _looped(x: Tensor, filters: Tensor, geometry: Geometry) -> Tensor:
    batches = x.unflatten(0, (len(filters), -1)).unbind()
    return torch.cat([F.conv2d(batch, its, None, *geometry) for batch, its in zip(batches, filters, strict=True)])


def _unfolded(x: Tensor, filters: Tensor, geometry: Geometry) -> Tensor:
    clients, channels, _, height, width = filters.shape
    kernel = (height, width)
    patches = F.unfold(x, kernel, geometry.dilation, geometry.padding, geometry.stride)
    y = filters.flatten(2)[:, None] @ patches.unflatten(0, (clients, -1))
    return y.reshape(len(x), channels, *_output_size(x.shape[2:], kernel, geometry))


def _output_size(size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> list[int]:
    sides = zip(size, kernel, *geometry, strict=True)
    return [(length + 2 * pad - gap * (side - 1) - 1) // step + 1 for length, side, step, pad, gap in sides]


Way = Callable[[Tensor, Tensor, Geometry], Tensor]
WAYS: dict[str, Way] = {"grouped": _grouped, "looped": _looped, "unfolded": _unfolded}


def _choose(x: Tensor, filters: Tensor, geometry: Geometry, timed: bool) -> str:
    if timed:
        return _fastest(x, filters, geometry)
    size = _output_size(x.shape[2:], filters.shape[-2:], geometry)
    return convolution_way((len(x) // len(filters), *x.shape[1:]), filters.shape[1:], size, x.device.type)


@torch.enable_grad()
def _fastest(x: Tensor, filters: Tensor, geometry: Geometry) -> str:
    """Return the way that is fastest there and back."""
    x, filters = x.detach().requires_grad_(), filters.detach().requires_grad_()

    def there_and_back(way: Way) -> object:
        return torch.autograd.grad(way(x, filters, geometry).square().sum(), (x, filters))

    return fastest({name: partial(there_and_back, way) for name, way in WAYS.items()})
