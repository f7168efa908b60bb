"""An embedding through n singular terms."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.base import FactorizedLayer
from sharding.modules.wrappers import whole


class FactorizedEmbedding(FactorizedLayer):
    """Row i of U Ω Vᵀ for each id i: a lookup of n numbers, and n·dim multiplications.

    A padding row of zeros, the default, stays zero: its row of U is zero in every term and has no gradient.
    """

    made_from = nn.Embedding
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    scale_grad_by_freq: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        num_terms: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dense = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="meta", dtype=dtype)
        super().__init__(dense, num_terms, device)
        self.reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (…) to vectors (…, embedding_dim), in the table's type under autocast too, as `nn.Embedding` does."""
        rows = F.embedding(ids, self.u, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return F.linear(rows * self.multipliers, self.v).to(self.v.dtype)  # whatever type autocast gave the product

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw U and V, except for the padding row."""
        super().reset_parameters()
        if self.padding_idx is not None:
            self.u[self.padding_idx] = 0

    @classmethod
    def from_dense(cls, layer: nn.Module, num_terms: int) -> Self:
        """Return a copy of `layer` that holds its `num_terms` largest singular terms; see `FactorizedLayer`."""
        factorized = super().from_dense(layer, num_terms)
        clear_padding(layer, factorized.u.detach())
        return factorized

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, num_terms={self.num_terms}"


def padding_row(layer: nn.Module) -> int | None:
    """Return an embedding's padding row if it is zero (assumed on the meta device), else None."""
    if not isinstance(layer, nn.Embedding) or layer.padding_idx is None:
        return None
    row = whole(layer.weight.detach())[layer.padding_idx]
    return layer.padding_idx if row.is_meta or not bool(row.any()) else None


def clear_padding(layer: nn.Module, u: Tensor) -> None:
    """Set u' to zero in the weight's padding row, in place: a term of magnitude zero can have any u'."""
    if (row := padding_row(layer)) is not None:
        u[row] = 0
