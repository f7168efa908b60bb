"""Convolutions through n singular terms: one with the kernel's size and a 1×1 one, with n channels between them.

The weight of a convolution, (out, in/groups, *kernel), counts as a matrix of `out` rows. Column i of V is a filter
(in, *kernel); the 1×1 convolution with UΩ follows. The weight of a transposed convolution, (in, out/groups, *kernel),
counts as a matrix of `in` rows. So the 1×1 convolution with U comes first, and column i of V is the filter
(out, *kernel) that term i adds to the output.

Stride, padding and dilation belong to the convolution of the kernel's size. With groups, each block of the matrix has
its own n terms, and both convolutions are grouped.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.base import FactorizedLayer


class Convolution(FactorizedLayer):
    """The base of `FactorizedConv1d`, …, `FactorizedConvTranspose3d`."""

    _convolve: ClassVar[Callable[..., Tensor]]  # torch's function for this number of dimensions
    shown: ClassVar[tuple[str, ...]] = ("kernel_size", "num_terms", "stride", "padding", "dilation")
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any  # a tuple, "same" or "valid"
    dilation: tuple[int, ...]
    groups: int

    def extra_repr(self) -> str:
        """Return the geometry, for `repr`."""
        parts = [str(self.in_channels), str(self.out_channels)]
        parts += [f"{name}={getattr(self, name)}" for name in self.shown]
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        return ", ".join([*parts, f"bias={self.bias is not None}"])

    def _filters(self) -> Tensor:
        """Return V as filters, shape (n·groups, channels/groups, *kernel)."""
        return stacked_terms(self.v, self.num_blocks).view(-1, self.weight_shape[1], *self.kernel_size)

    def _pointwise(self, matrix: Tensor) -> Tensor:
        """Return a matrix as the filters of a 1×1 convolution, shape (*matrix, 1, …)."""
        return matrix[(..., *(None for _ in self.kernel_size))]

    def _scaled(self, terms: Tensor) -> Tensor:
        """Multiply terms (…, n·groups, *positions) by Ω."""
        omega = self.multipliers if self.num_blocks == 1 else self.multipliers.repeat(self.num_blocks)
        return terms * omega.view(-1, *(1 for _ in self.kernel_size))


class FactorizedConv(Convolution):
    """y = (U Ω) ∗₁ (V ∗ₖ x) + b."""

    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]
    _reversed_padding_repeated_twice: list[int]

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, *positions) to (batch, out_channels, *positions')."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        filters = self._filters().contiguous()  # once, not in every convolution's kernel
        terms = self._convolve(x, filters, None, self.stride, padding, self.dilation, self.groups)
        pointwise = max(self.kernel_size) == 1  # it costs little, so scaling U would count; there may be one position
        u = self.u if pointwise else self.scaled_u
        terms = self._scaled(terms) if pointwise else terms
        return self._convolve(terms, self._pointwise(u), self.bias, 1, 0, 1, self.groups)


class FactorizedConv1d(FactorizedConv):
    """y = (U Ω) ∗₁ (V ∗ₖ x) + b, for x of shape (batch, in, L)."""

    made_from, _convolve = nn.Conv1d, staticmethod(F.conv1d)


class FactorizedConv2d(FactorizedConv):
    """y = (U Ω) ∗₁ₓ₁ (V ∗ₖₓₖ x) + b, for x of shape (batch, in, H, W)."""

    made_from, _convolve = nn.Conv2d, staticmethod(F.conv2d)


class FactorizedConv3d(FactorizedConv):
    """y = (U Ω) ∗₁ₓ₁ₓ₁ (V ∗ₖₓₖₓₖ x) + b, for x of shape (batch, in, D, H, W)."""

    made_from, _convolve = nn.Conv3d, staticmethod(F.conv3d)


class FactorizedConvTranspose(Convolution):
    """y = V ∗ᵀₖ (Ω Uᵀ ∗₁ x) + b."""

    _transpose: ClassVar[Callable[..., Tensor]]  # torch's function for this number of dimensions
    shown = ("kernel_size", "num_terms", "stride", "padding", "output_padding", "dilation")
    output_padding: tuple[int, ...]
    _output_padding: Callable[..., list[int]] = nn.ConvTranspose2d._output_padding  # for any number of dimensions

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (batch, in_channels, *positions) to (batch, out_channels, *positions')."""
        rows = stacked_terms(self.u, self.num_blocks)
        terms = self._scaled(self._convolve(x, self._pointwise(rows), None, 1, 0, 1, self.groups))
        dims = len(self.kernel_size)
        extra = self._output_padding(x, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)
        return self._transpose(
            terms, self._filters(), self.bias, self.stride, self.padding, extra, self.groups, self.dilation
        )


class FactorizedConvTranspose1d(FactorizedConvTranspose):
    """For x of shape (batch, in, L)."""

    made_from, _convolve, _transpose = nn.ConvTranspose1d, staticmethod(F.conv1d), staticmethod(F.conv_transpose1d)


class FactorizedConvTranspose2d(FactorizedConvTranspose):
    """For x of shape (batch, in, H, W)."""

    made_from, _convolve, _transpose = nn.ConvTranspose2d, staticmethod(F.conv2d), staticmethod(F.conv_transpose2d)


class FactorizedConvTranspose3d(FactorizedConvTranspose):
    """For x of shape (batch, in, D, H, W)."""

    made_from, _convolve, _transpose = nn.ConvTranspose3d, staticmethod(F.conv3d), staticmethod(F.conv_transpose3d)


def stacked_terms(factor: Tensor, blocks: int) -> Tensor:
    """Return the terms of every block as rows: (blocks·columns, n) to (blocks·n, columns)."""
    return factor.mT if blocks == 1 else factor.unflatten(0, (blocks, -1)).mT.flatten(0, 1)
