"""An embedding through n singular terms."""

from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers.base import FactorizedLayer
from sharding.modules.wrappers import full_tensor


class FactorizedEmbedding(FactorizedLayer):
    """Row i of R + T + U Ω Vᵀ for each id i: a lookup of n numbers, and n·dim multiplications.

    A padding row of zeros, the default, stays zero: its row of U is zero in every term and has no gradient.
    """

    made_from = (nn.Embedding,)
    adds_residual = True
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        """Map ids (…) to vectors (…, embedding_dim), in the table's type under autocast too, as `nn.Embedding` does."""
        rows = F.embedding(input, self.u, self.padding_idx)
        vectors = F.linear(rows * self.omega, self.v).to(self.v.dtype)  # whatever type autocast gave the product
        for part in self.frozen:
            vectors = vectors + part.select(input.flatten(), self.v.dtype).view_as(vectors)
        return vectors

    def _clear(self, layer: nn.Module) -> None:
        assert isinstance(layer, nn.Embedding)
        if (row := padding_row(layer)) is not None:
            self.u[row] = 0  # a term of magnitude zero can have any u'

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, num_terms={self.num_terms}"


def padding_row(layer: nn.Embedding) -> int | None:
    """Return an embedding's padding row if it is zero (assumed on the meta device), else None."""
    if layer.padding_idx is None:
        return None
    row = full_tensor(layer.weight.detach())[layer.padding_idx]
    return layer.padding_idx if row.is_meta or not bool(row.any()) else None
