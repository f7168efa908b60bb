"""A transposed convolution through n singular terms: a 1×1 convolution to n channels, then a transposed one.

The weight (in, out/groups, *kernel) counts as a matrix of `in` rows. So U belongs to the inputs here, and column i of
V is the filter (out, *kernel) that term i adds to the output.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.conv import Convolution, Size, repeated, stacked_terms


class FactorizedConvTranspose(Convolution):
    """The base of transposed convolutions; the arguments are those of the dense layer, and `num_terms`."""

    if TYPE_CHECKING:  # as in `FactorizedConv`
        in_channels: int
        out_channels: int
        kernel_size: tuple[int, ...]
        stride: tuple[int, ...]
        padding: tuple[int, ...]
        output_padding: tuple[int, ...]
        dilation: tuple[int, ...]
        groups: int
        _output_padding: Callable[..., list[int]]
    else:
        _output_padding = nn.ConvTranspose2d._output_padding  # torch's arithmetic, for any number of dimensions
    shown = ("kernel_size", "num_terms", "stride", "padding", "output_padding", "dilation")

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

    def _combination(self) -> Tensor:
        """Return U as the filters of a 1×1 convolution, shape (n·groups, in/groups, 1, …)."""
        rows = stacked_terms(self.u, self.num_blocks)
        return rows.view([-1, self.weight_shape[0] // self.num_blocks] + [1] * len(self.kernel_size))

    def _scaled(self, terms: Tensor) -> Tensor:
        """Multiply terms (…, n·groups, *positions) by Ω."""
        return terms * repeated(self.multipliers, self.num_blocks).view([-1] + [1] * len(self.kernel_size))

    def _filters(self) -> Tensor:
        """Return V as filters, shape (n·groups, out/groups, *kernel)."""
        return stacked_terms(self.v, self.num_blocks).view([-1, self.weight_shape[1], *self.kernel_size])

    def _extra(self, x: Tensor, output_size: list[int] | None) -> list[int]:
        """Return by how much the output is larger than it has to be, so as to have the size that is asked for."""
        dims = len(self.kernel_size)
        return self._output_padding(x, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)


class FactorizedConvTranspose1d(FactorizedConvTranspose):
    """For x of shape (batch, in, L)."""

    kind = nn.ConvTranspose1d

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (batch, in_channels, L) to (batch, out_channels, L')."""
        terms = self._scaled(F.conv1d(x, self._combination(), None, 1, 0, 1, self.groups))
        extra = self._extra(x, output_size)
        return F.conv_transpose1d(
            terms, self._filters(), self.bias, self.stride, self.padding, extra, self.groups, self.dilation
        )


class FactorizedConvTranspose2d(FactorizedConvTranspose):
    """For x of shape (batch, in, H, W)."""

    kind = nn.ConvTranspose2d

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (batch, in_channels, H, W) to (batch, out_channels, H', W')."""
        terms = self._scaled(F.conv2d(x, self._combination(), None, 1, 0, 1, self.groups))
        extra = self._extra(x, output_size)
        return F.conv_transpose2d(
            terms, self._filters(), self.bias, self.stride, self.padding, extra, self.groups, self.dilation
        )


class FactorizedConvTranspose3d(FactorizedConvTranspose):
    """For x of shape (batch, in, D, H, W)."""

    kind = nn.ConvTranspose3d

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (batch, in_channels, D, H, W) to (batch, out_channels, D', H', W')."""
        terms = self._scaled(F.conv3d(x, self._combination(), None, 1, 0, 1, self.groups))
        extra = self._extra(x, output_size)
        return F.conv_transpose3d(
            terms, self._filters(), self.bias, self.stride, self.padding, extra, self.groups, self.dilation
        )
