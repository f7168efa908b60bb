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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.base import FactorizedLayer
from sharding.layers.frozen import CONVOLVE, TRANSPOSE, frozen_convolution
from sharding.layers.tail import as_filters, convolution_with_tail, stacked_terms
from sharding.matrices.quantization import split_terms

torch.fx.wrap("convolution_with_tail")  # a tracer sees them as single steps
torch.fx.wrap("frozen_convolution")


class Convolution(FactorizedLayer):
    """The base of `FactorizedConv` and `FactorizedConvTranspose`."""

    adds_residual = True
    repr_names: ClassVar[tuple[str, ...]] = ("kernel_size", "num_terms", "stride", "padding", "dilation")
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
        parts += [f"{name}={getattr(self, name)}" for name in self.repr_names]
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        return ", ".join([*parts, f"bias={self.bias is not None}"])

    def _filters(self) -> Tensor:
        """Return V as filters, shape (n·groups, channels/groups, *kernel)."""
        return stacked_terms(self.v, self.num_blocks).view(-1, self.weight_shape[1], *self.kernel_size)

    def _scaled(self, terms: Tensor) -> Tensor:
        """Multiply terms (…, n·groups, *positions) by Ω."""
        omega = self.omega if self.num_blocks == 1 else self.omega.repeat(self.num_blocks)
        return terms * omega.view(-1, *(1 for _ in self.kernel_size))


@torch.no_grad()
def lay_out_filters(model: nn.Module) -> nn.Module:
    """Let V of convolutions lie in memory as the filters that it is, in place, and return the model.

    Then no step copies V to filters, nor their gradient back. It keeps its shape, and becomes column-major. With groups
    it stays as it is: the filters of a term are not at one distance there.
    """
    for layer in model.modules():
        if isinstance(layer, Convolution) and layer.num_blocks == 1:
            layer.v.data = layer.v.mT.contiguous().mT
    return model


class FactorizedConv(Convolution):
    """y = (R + T) ∗ₖ x + (U Ω) ∗₁ (V ∗ₖ x) + b, for `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""

    made_from = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]
    _reversed_padding_repeated_twice: list[int]

    def forward(self, input: Tensor) -> Tensor:
        """Map (batch, in_channels, …) to (batch, out_channels, …)."""
        dims, padding = len(self.kernel_size), self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        if padding == "same" and self.frozen:
            input, padding = F.pad(input, self._reversed_padding_repeated_twice), 0
        filters = self._filters().contiguous()  # at most once, not in every convolution's kernel
        sizes = [0] * dims if isinstance(padding, str | int) else padding
        geometry = (self.stride, sizes, self.dilation, self.groups)
        if self.tail is not None:
            factors = split_terms(self.tail, self.out_channels // self.groups)
            y = convolution_with_tail(input, filters, self.scaled_u, factors, *geometry)
            y = y if self.bias is None else y + self.bias.to(y.dtype).view(-1, *(1 for _ in range(dims)))
        else:
            convolve = CONVOLVE[dims]
            terms = convolve(input, filters, None, self.stride, padding, self.dilation, self.groups)
            pointwise = max(self.kernel_size) == 1  # it costs little, so scaling U would count; or has one position
            u = self.u if pointwise else self.scaled_u
            terms = self._scaled(terms) if pointwise else terms
            y = convolve(terms, as_filters(u, dims), self.bias, 1, 0, 1, self.groups)
        if self.residual is not None:
            y = y + frozen_convolution(input, self.residual, self.weight_shape, *geometry)
        return y


class FactorizedConvTranspose(Convolution):
    """y = (R + T) ∗ᵀₖ x + V ∗ᵀₖ (Ω Uᵀ ∗₁ x) + b.

    For `nn.ConvTranspose1d`, `nn.ConvTranspose2d` and `nn.ConvTranspose3d`.
    """

    made_from = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    repr_names = ("kernel_size", "num_terms", "stride", "padding", "output_padding", "dilation")
    output_padding: tuple[int, ...]
    _output_padding: Callable[..., list[int]] = nn.ConvTranspose2d._output_padding  # for any number of dimensions

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (batch, in_channels, …) to (batch, out_channels, …)."""
        dims, rows = len(self.kernel_size), stacked_terms(self.u, self.num_blocks)
        terms = self._scaled(CONVOLVE[dims](input, as_filters(rows, dims), None, 1, 0, 1, self.groups))
        geometry_of_output = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        extra = self._output_padding(input, output_size, *geometry_of_output)
        y = TRANSPOSE[dims](
            terms, self._filters(), self.bias, self.stride, self.padding, extra, self.groups, self.dilation
        )
        geometry = (self.stride, self.padding, self.dilation, self.groups, extra)
        for part in self.frozen:
            y = y + part.transposed_convolution(input, self.weight_shape, *geometry)
        return y
