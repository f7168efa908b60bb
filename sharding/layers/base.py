"""What all factorized layers share: W ≈ U Ω Vᵀ, U and V learnable, the diagonal Ω frozen."""

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.spectrum import decompose_one


class FactorizedLayer(nn.Module):
    """A layer whose matrix is the sum of n singular terms, ωᵢ·u'ᵢ v'ᵢᵀ.

    Attributes:
        u: u', shape (out, n), learnable.
        v: v', shape (in, n), learnable.
        multipliers: ω, shape (n,), a buffer: saved and moved with the module, never trained.
        bias: shape (out,), learnable, or None.
    """

    u: nn.Parameter
    v: nn.Parameter
    multipliers: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        rows: int,
        columns: int,
        num_terms: int,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_terms <= min(rows, columns):
            raise UserError(
                f"num_terms is {num_terms}, but a matrix of {rows}×{columns} has 1 to {min(rows, columns)} terms"
            )
        self.u = nn.Parameter(torch.empty(rows, num_terms, device=device, dtype=dtype))
        self.v = nn.Parameter(torch.empty(columns, num_terms, device=device, dtype=dtype))
        self.register_buffer("multipliers", torch.ones(num_terms, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @property
    def num_terms(self) -> int:
        """The number of singular terms n."""
        return self.u.shape[1]

    @property
    def scaled_u(self) -> Tensor:
        """UΩ, shape (out, n): scaling the factor is cheaper than scaling the activations."""
        return self.u * self.multipliers

    def matrix(self) -> Tensor:
        """Return UΩVᵀ, shape (out, in)."""
        return self.scaled_u @ self.v.mT

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw U and V so that UVᵀ has the variance 1/(3·in) of `nn.Linear`'s default; bias and multipliers 0 and 1."""
        if self.u.is_meta:  # there is nothing to draw, and torch would load much for it
            return
        scale = (3 * self.v.shape[0] * self.num_terms) ** -0.25
        nn.init.normal_(self.u, std=scale)
        nn.init.normal_(self.v, std=scale)
        nn.init.ones_(self.multipliers)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_dense(cls, layer: nn.Module, num_terms: int) -> Self:
        """Return a copy of `layer` that holds its `num_terms` largest singular terms, with ω = 1.

        At num_terms = N (the rank) it computes the same function as `layer`.

        Raises:
            UserError: num_terms is not in 1…N, or the layer is of a kind that cannot be factorized.
        """
        factorized = cls.empty_like(layer, num_terms)
        spectrum = decompose_one(_weight(layer).flatten(1))
        with torch.no_grad():
            factorized.u.copy_(spectrum.u[:, :num_terms])
            factorized.v.copy_(spectrum.v[:, :num_terms])
        _copy_bias_and_mode(layer, factorized)
        return factorized

    def to_dense(self) -> nn.Module:
        """Return the ordinary layer with weight UΩVᵀ, composed in float64 so that half precision does not drift."""
        dense = self._empty_dense()
        with torch.no_grad():
            weight = (self.u.double() * self.multipliers.double()) @ self.v.double().mT
            _weight(dense).copy_(weight.view_as(_weight(dense)))
        _copy_bias_and_mode(self, dense)
        return dense

    @classmethod
    @abstractmethod
    def empty_like(cls, layer: nn.Module, num_terms: int, device: torch.device | str | None = None) -> Self:
        """Return a factorized layer of the geometry of `layer`, its values yet to be filled in.

        Args:
            layer: the dense layer; its values are not read, it may be on the `meta` device.
            num_terms: n.
            device: where to make it; by default where `layer` is.

        Raises:
            UserError: num_terms is not in 1…N, or the layer is of a kind that cannot be factorized.
        """

    @abstractmethod
    def _empty_dense(self) -> nn.Module:
        """Return an ordinary layer of the same geometry, its values yet to be filled in."""


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


@torch.no_grad()
def _copy_bias_and_mode(source: nn.Module, target: nn.Module) -> None:
    target.train(source.training)
    if isinstance(source.bias, Tensor):
        assert isinstance(target.bias, nn.Parameter)
        target.bias.copy_(source.bias)
        target.bias.requires_grad_(source.bias.requires_grad)
