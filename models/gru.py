"""A recurrent network that predicts the next character."""

from torch import Tensor, nn

from models.options import positive
from sharding.errors import UserError


class GRU(nn.Module):
    """Gated recurrent units in layers, on learned embeddings of the characters, and an affine layer.

    With two layers of 256 it is the network of Chen, Horváth & Richtárik (TMLR 2022), Section 5.3. Their paper does not
    state the width of the embedding; 8 is that of McMahan et al. 2017.

    Args:
        input_shape: (length,) of the ids.
        num_classes: number of ids.
        width: the width of each recurrent layer.
        depth: the number of recurrent layers.
        embedding: width of the embedding.

    Raises:
        UserError: the input is not a sequence, or a number is not positive.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, *, width: int = 256, depth: int = 2, embedding: int = 8
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise UserError(f"gru reads sequences of token ids (length,), not inputs of shape {input_shape}")
        positive(width=width, depth=depth, embedding=embedding)
        self.embed = nn.Embedding(num_classes, embedding)
        self.gru = nn.GRU(embedding, width, depth, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (batch, length) to the logits of those that follow (batch, length, num_classes)."""
        states, _ = self.gru(self.embed(ids))
        logits: Tensor = self.head(states)
        return logits
