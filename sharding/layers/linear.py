"""A linear layer through n singular terms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.base import FactorizedLayer


@torch.fx.wrap  # a tracer does not know the types
def linear_by_terms(x: Tensor, first: Tensor, omega: Tensor, last: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · first · Ω · lastᵀ + bias.

    Ω scales the terms of each sample, which are fewer than the entries of `last` unless the batch is large. In autocast
    they have fewer bits than Ω, and so would be cast twice, and their gradient too: there Ω scales `last`.
    """
    terms = x @ first
    if terms.dtype == omega.dtype:
        return F.linear(terms * omega, last, bias)
    return F.linear(terms, last * omega, bias)


class FactorizedLinear(FactorizedLayer):
    """y = (R + T) x + U Ω Vᵀ x + b, for x of shape (..., in_features) and y of shape (..., out_features).

    Without R and T it takes n·(in + out) multiplications a sample; `nn.Linear` takes in·out.
    """

    made_from = (nn.Linear,)
    adds_residual = True
    in_features: int
    out_features: int

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        y = linear_by_terms(input, self.v, self.omega, self.u, self.bias)
        for part in self.frozen:
            y = y + part.linear(input)
        return y

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"{self.in_features}, {self.out_features}, num_terms={self.num_terms}, bias={self.bias is not None}"


class FactorizedTransposedLinear(FactorizedLayer):
    """The `Conv1D` of transformers, as in GPT-2: a linear layer whose weight is stored as (in, out).

    The class of the dense layer is recognized by its attributes, see `is_transposed_linear`.
    """

    adds_residual = True
    nf: int

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., nx) to (..., nf)."""
        y = linear_by_terms(x, self.u, self.omega, self.v, self.bias)
        for part in self.frozen:
            y = y + part.linear(x, transposed=True)
        return y

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"nf={self.nf}, nx={self.weight_shape[0]}, num_terms={self.num_terms}"


def is_transposed_linear(layer: nn.Module) -> bool:
    """Whether a layer is transformers' `Conv1D`, judged by its attributes, without importing transformers."""
    kind = next((kind for kind in type(layer).__mro__ if kind.__name__ == "Conv1D"), None)
    weight = layer._parameters.get("weight")
    return (
        kind is not None
        and type(layer).forward is vars(kind).get("forward")
        and weight is not None
        and weight.dim() == 2
        and weight.shape[1] == getattr(layer, "nf", None)
    )
