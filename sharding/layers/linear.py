"""A linear layer through n singular terms."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.errors import UserError
from sharding.layers.base import FactorizedLayer


class FactorizedLinear(FactorizedLayer):
    """y = U Ω Vᵀ x + b, for x of shape (..., in_features) and y of shape (..., out_features).

    Costs n·(in + out) multiplications a sample where `nn.Linear` costs in·out.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_terms: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features, num_terms, bias, device, dtype)
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return F.linear(F.linear(x, self.v.mT), self.scaled_u, self.bias)

    @property
    def weight(self) -> Tensor:
        """The matrix UΩVᵀ, shape (out, in), for code that reads `layer.weight`."""
        return self.matrix()

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"{self.in_features}, {self.out_features}, num_terms={self.num_terms}, bias={self.bias is not None}"

    @classmethod
    def empty_like(cls, layer: nn.Module, num_terms: int, device: torch.device | str | None = None) -> Self:
        """Return a factorized layer of the geometry of `layer`, its values yet to be filled in."""
        if not isinstance(layer, nn.Linear):
            raise UserError(f"FactorizedLinear is made from an nn.Linear, not from {type(layer).__name__}")
        return cls(
            layer.in_features,
            layer.out_features,
            num_terms,
            layer.bias is not None,
            layer.weight.device if device is None else device,
            layer.weight.dtype,
        )

    def _empty_dense(self) -> nn.Linear:
        return nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=self.u.device,
            dtype=self.u.dtype,
        )
