"""An embedding through n singular terms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.base import FactorizedLayer


class FactorizedEmbedding(FactorizedLayer):
    """Row i of U Ω Vᵀ for each id i: n numbers are looked up, and n·dim multiplications make a vector of them.

    A padding row stays what it is while V changes only if it is zero, as it is by default.
    """

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
        """Map ids (…) to vectors (…, embedding_dim)."""
        rows = F.embedding(ids, self.u, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return F.linear(rows * self.multipliers, self.v)

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, num_terms={self.num_terms}"

    @classmethod
    def made_from(cls) -> type[nn.Module]:
        """Return `nn.Embedding`."""
        return nn.Embedding
