"""A convolution through n singular terms: a k×k convolution to n channels, then a 1×1 one."""

from typing import Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.errors import UserError
from sharding.layers.base import FactorizedLayer

Pair = tuple[int, int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class FactorizedConv2d(FactorizedLayer):
    """y = (U Ω) ∗₁ₓ₁ (V ∗ₖₓₖ x) + b, for x of shape (batch, in, H, W).

    The weight (out, in, kh, kw) is seen as a matrix (out, in·kh·kw). Column i of V is a filter (in, kh, kw), and
    stride, padding and dilation belong to that first convolution.

    Raises:
        UserError: `groups` is not 1. A grouped convolution is a block-diagonal matrix, whose singular terms do not
            keep the blocks.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        num_terms: int,
        stride: int | Pair = 1,
        padding: str | int | Pair = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if groups != 1:
            raise UserError(
                f"a convolution with groups={groups} cannot be factorized: only groups=1 can; leave it whole (skip=…)"
            )
        # A weightless convolution, so that torch itself checks and normalizes the geometry.
        geometry = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, 1, False, padding_mode, "meta"
        )
        height, width = geometry.kernel_size
        super().__init__(out_channels, in_channels * height * width, num_terms, bias, device, dtype)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = (height, width)
        self.stride = cast(Pair, geometry.stride)
        self.dilation = cast(Pair, geometry.dilation)
        self.padding = cast(str | Pair, geometry.padding)
        self.padding_mode: PaddingMode = padding_mode

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, H, W) to (batch, out_channels, H', W')."""
        padding: str | int | Pair = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._margins(), mode=self.padding_mode), 0
        filters = self.v.mT.reshape(self.num_terms, self.in_channels, *self.kernel_size)
        terms = F.conv2d(x, filters, None, self.stride, padding, self.dilation)
        return F.conv2d(terms, self.scaled_u[:, :, None, None], self.bias)

    @property
    def weight(self) -> Tensor:
        """The kernel UΩVᵀ, shape (out, in, kh, kw), for code that reads `layer.weight`."""
        return self.matrix().view(self.out_channels, self.in_channels, *self.kernel_size)

    def extra_repr(self) -> str:
        """Return the geometry, for `repr`."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, num_terms={self.num_terms}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, bias={self.bias is not None}"
        )

    def _margins(self) -> list[int]:
        """Padding as (left, right, top, bottom), for the padding modes that `F.conv2d` itself does not know."""
        margins: list[int] = []
        for axis in (1, 0):
            total = self.dilation[axis] * (self.kernel_size[axis] - 1)
            if self.padding == "same":
                margins += [total // 2, total - total // 2]
            elif self.padding == "valid":
                margins += [0, 0]
            else:
                margins += [int(self.padding[axis])] * 2
        return margins

    @classmethod
    def empty_like(cls, layer: nn.Module, num_terms: int, device: torch.device | str | None = None) -> Self:
        """Return a factorized layer of the geometry of `layer`, its values yet to be filled in."""
        if not isinstance(layer, nn.Conv2d):
            raise UserError(f"FactorizedConv2d is made from an nn.Conv2d, not from {type(layer).__name__}")
        return cls(
            layer.in_channels,
            layer.out_channels,
            cast(Pair, layer.kernel_size),
            num_terms,
            cast(Pair, layer.stride),
            cast(str | Pair, layer.padding),
            cast(Pair, layer.dilation),
            layer.groups,
            layer.bias is not None,
            layer.padding_mode,
            layer.weight.device if device is None else device,
            layer.weight.dtype,
        )

    def _empty_dense(self) -> nn.Conv2d:
        return nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            bias=self.bias is not None,
            padding_mode=self.padding_mode,
            device=self.u.device,
            dtype=self.u.dtype,
        )
