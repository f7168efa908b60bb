"""A convolution through n singular terms: one to n channels with the kernel's size, then a 1×1 one.

The weight (out, in/groups, *kernel) counts as a matrix of out rows. Column i of V is a filter (in, *kernel); stride,
padding and dilation belong to that first convolution. With groups, each block of the matrix has its own n terms, and
both convolutions are grouped.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.base import FactorizedLayer

Size = int | tuple[int, ...]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Convolution(FactorizedLayer):
    """The base of plain and transposed convolutions: the dense layer's class, and `repr`."""

    kind: ClassVar[Any]  # the dense layer
    shown: ClassVar[tuple[str, ...]] = ("kernel_size", "num_terms", "stride", "padding", "dilation")

    def extra_repr(self) -> str:
        """Return the geometry, for `repr`."""
        parts = [str(self.in_channels), str(self.out_channels)]
        parts += [f"{name}={getattr(self, name)}" for name in self.shown]
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        return ", ".join([*parts, f"bias={self.bias is not None}"])

    @classmethod
    def made_from(cls) -> type[nn.Module]:
        """Return the dense convolution."""
        kind: type[nn.Module] = cls.kind
        return kind


class FactorizedConv(Convolution):
    """The base of `FactorizedConv1d`, `FactorizedConv2d` and `FactorizedConv3d`.

    The arguments are those of the dense layer, with `num_terms` after the kernel's size.
    """

    if TYPE_CHECKING:  # torch.jit.script would go by annotations, and knows no tuple[int, ...]
        in_channels: int
        out_channels: int
        kernel_size: tuple[int, ...]
        stride: tuple[int, ...]
        padding: Any  # a tuple, "same" or "valid"
        dilation: tuple[int, ...]
        groups: int
        padding_mode: PaddingMode
        _reversed_padding_repeated_twice: list[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        num_terms: int,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(self.kind(*sizes, "meta", dtype), num_terms, device)  # which checks and normalizes them
        self.reset_parameters()

    def _filters(self) -> Tensor:
        """Return V as filters, shape (n·groups, in/groups, *kernel)."""
        filters = stacked_terms(self.v, self.num_blocks).contiguous()  # once, not in every convolution's kernel
        return filters.view([-1, self.weight_shape[1], *self.kernel_size])

    def _is_pointwise(self) -> bool:
        return max(list(self.kernel_size)) == 1  # not from v, whose shape torch.fx does not know

    def _combination(self) -> Tensor:
        """Return UΩ as the filters of a 1×1 convolution, shape (out, n, 1, …), or U if `_scaled` applies Ω."""
        u = self.u if self._is_pointwise() else self.u * self.multipliers
        return u.view([self.weight_shape[0], -1] + [1] * len(self.kernel_size))

    def _scaled(self, terms: Tensor) -> Tensor:
        """Multiply terms (…, n·groups, *positions) by Ω in a 1×1 convolution, which may have a single position.

        With a larger kernel the convolutions cost so much more than scaling U that `_combination` scales U.
        """
        if not self._is_pointwise():
            return terms
        return terms * repeated(self.multipliers, self.num_blocks).view([-1] + [1] * len(self.kernel_size))


class FactorizedConv1d(FactorizedConv):
    """y = (U Ω) ∗₁ (V ∗ₖ x) + b, for x of shape (batch, in, L)."""

    kind = nn.Conv1d

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, L) to (batch, out_channels, L')."""
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            terms = F.conv1d(x, self._filters(), None, self.stride, 0, self.dilation, self.groups)
        else:
            terms = F.conv1d(x, self._filters(), None, self.stride, self.padding, self.dilation, self.groups)
        return F.conv1d(self._scaled(terms), self._combination(), self.bias, 1, 0, 1, self.groups)


class FactorizedConv2d(FactorizedConv):
    """y = (U Ω) ∗₁ₓ₁ (V ∗ₖₓₖ x) + b, for x of shape (batch, in, H, W)."""

    kind = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, H, W) to (batch, out_channels, H', W')."""
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            terms = F.conv2d(x, self._filters(), None, self.stride, 0, self.dilation, self.groups)
        else:
            terms = F.conv2d(x, self._filters(), None, self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(self._scaled(terms), self._combination(), self.bias, 1, 0, 1, self.groups)


class FactorizedConv3d(FactorizedConv):
    """y = (U Ω) ∗₁ₓ₁ₓ₁ (V ∗ₖₓₖₓₖ x) + b, for x of shape (batch, in, D, H, W)."""

    kind = nn.Conv3d

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, D, H, W) to (batch, out_channels, D', H', W')."""
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            terms = F.conv3d(x, self._filters(), None, self.stride, 0, self.dilation, self.groups)
        else:
            terms = F.conv3d(x, self._filters(), None, self.stride, self.padding, self.dilation, self.groups)
        return F.conv3d(self._scaled(terms), self._combination(), self.bias, 1, 0, 1, self.groups)


def stacked_terms(factor: Tensor, blocks: int) -> Tensor:
    """Return the terms of every block as rows: (blocks·columns, n) to (blocks·n, columns)."""
    if blocks == 1:
        return factor.mT
    return factor.unflatten(0, [blocks, -1]).mT.flatten(0, 1)


def repeated(multipliers: Tensor, blocks: int) -> Tensor:
    """Return ω once for every block, shape (blocks·n,)."""
    return multipliers if blocks == 1 else multipliers.repeat(blocks)
