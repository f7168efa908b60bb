"""A tiny GPT-2 that predicts the next character.

Each position looks back at the ones before it through causal attention and emits logits for the token that
follows. The block is GPT-2's: pre-norm, GELU (tanh form), feed-forward four times as wide, biases everywhere,
learned positions. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, Section 2.3.

The default has three blocks of width 256 with 8 heads: 2.4 million parameters, all but 2% of them in the
blocks. The output layer is not tied to the embedding: both are small here, and a shared weight could not be
sent once as an embedding and once as a linear layer.
"""

import math

import torch
from torch import Tensor, nn

from models.attention import FeedForward, SelfAttention
from models.options import fraction, positive
from sharding.errors import UserError


class GPT(nn.Module):
    """Decoder-only transformer over token ids.

    Args:
        input_shape: (context,), the longest sequence it reads.
        num_classes: number of token ids, in and out.
        width: width of the sequence.
        depth: number of blocks.
        heads: the number of attention heads; must divide `width`.
        dropout: dropout on embeddings, attention weights and both branches, as in GPT-2.
        fused_qkv: q, k and v of an attention are one layer, as in GPT-2's own code.

    Attributes:
        ends: the first layer is the embedding, so all affine layers but the last are sharded.

    Raises:
        UserError: the input is not a sequence, a number is out of range, or `heads` does not divide `width`.
    """

    ends = ("tokens", "fc")

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        width: int = 256,
        depth: int = 3,
        heads: int = 8,
        dropout: float = 0.1,
        fused_qkv: bool = False,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise UserError(f"gpt_tiny reads sequences of token ids (length,), not inputs of shape {input_shape}")
        positive(width=width, depth=depth, heads=heads)
        fraction(dropout=dropout)
        if width % heads:
            raise UserError(f"heads={heads} does not divide width={width}; choose a divisor of {width}")
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Parameter(torch.empty(input_shape[0], width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, fused_qkv) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, num_classes, bias=False)
        self._initialize()

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 ids (batch, length ≤ context) to logits of the next id (batch, length, num_classes)."""
        tokens = self.dropout(self.tokens(ids) + self.positions[..., : ids.shape[-1], :])
        return self.fc(self.norm(self.blocks(tokens)))

    def _initialize(self) -> None:
        """Normal of scale 0.02; the last layer of a branch is smaller, so that the sum of branches keeps its scale."""
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks.children():
            assert isinstance(block, Block)
            for last in (block.attention.out, block.mlp.fc2):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * len(self.blocks)))


class Block(nn.Module):
    """Causal attention, then a feed-forward part; each reads a normalized copy and adds to the stream."""

    def __init__(self, width: int, heads: int, dropout: float, fused_qkv: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, bias=True, causal=True, dropout=dropout, fused=fused_qkv)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, 4 * width, nn.GELU("tanh"))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        tokens = tokens + self.dropout(self.attention(self.norm1(tokens)))
        return tokens + self.dropout(self.mlp(self.norm2(tokens)))
