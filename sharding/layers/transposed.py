"""A transposed convolution through n singular terms: a 1×1 convolution to n channels, then a transposed one.

The weight (in, out/groups, *kernel) is seen as a matrix of `in` rows, so U belongs to the inputs here, and column i of
V is what term i adds to the output, (out, *kernel).
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.conv import Convolution, Size, repeated, stacked_terms


class FactorizedConvTranspose(Convolution):
    """What transposed convolutions of all dimensions share; the arguments are the dense layer's, and `num_terms`."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    told = ("kernel_size", "num_terms", "stride", "padding", "output_padding", "dilation")
    pointwise: ClassVar[Callable[..., Tensor]]
    transposed_convolution: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        num_terms: int,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation)
        super().__init__(self.kind(*sizes, device="meta", dtype=dtype), num_terms, device)
        self.reset_parameters()

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Map (batch, in_channels, *positions) to (batch, out_channels, *more positions)."""
        dims, blocks = len(self.kernel_size), self.num_blocks
        ones = [1] * dims
        combination = stacked_terms(self.u, blocks)
        terms = self.pointwise(x, combination.view(list(combination.shape) + ones), None, 1, 0, 1, blocks)
        terms = terms * repeated(self.multipliers, blocks).view([-1, *ones])
        filters = stacked_terms(self.v, blocks).view([-1, *self.weight_shape[1:]])
        extra = nn.ConvTranspose2d._output_padding(  # torch's arithmetic, for any number of dimensions
            cast(nn.ConvTranspose2d, self),
            x,
            None if output_size is None else list(output_size),
            list(self.stride),
            list(self.padding),
            list(self.kernel_size),
            dims,
            list(self.dilation),
        )
        return self.transposed_convolution(
            terms, filters, self.bias, self.stride, self.padding, extra, blocks, self.dilation
        )


class FactorizedConvTranspose1d(FactorizedConvTranspose):
    """For x of shape (batch, in, L)."""

    kind = nn.ConvTranspose1d
    pointwise = staticmethod(F.conv1d)
    transposed_convolution = staticmethod(F.conv_transpose1d)


class FactorizedConvTranspose2d(FactorizedConvTranspose):
    """For x of shape (batch, in, H, W)."""

    kind = nn.ConvTranspose2d
    pointwise = staticmethod(F.conv2d)
    transposed_convolution = staticmethod(F.conv_transpose2d)


class FactorizedConvTranspose3d(FactorizedConvTranspose):
    """For x of shape (batch, in, D, H, W)."""

    kind = nn.ConvTranspose3d
    pointwise = staticmethod(F.conv3d)
    transposed_convolution = staticmethod(F.conv_transpose3d)
