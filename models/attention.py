"""The two halves of a transformer's layer, from linear layers, so that each projection can be sharded.

Self-attention, for every head: softmax(Q Kᵀ / √d) V, with Q, K and V linear in the input; the heads' outputs are
joined by a fourth projection. Vaswani et al., "Attention Is All You Need", NeurIPS 2017, Section 3.2.
"""

from math import inf, sqrt

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Self-attention over a sequence.

    Args:
        dim: width of the sequence; must be a multiple of `heads`.
        heads: number of heads.
        bias: whether q, k and v have biases (`out` always has one).
        causal: whether a position sees only itself and those before it.
        dropout: rate of dropout on the attention weights, in training only.
        fused: q, k and v are one layer `qkv` (dim → 3·dim), which shares its singular terms among the three, in the
            place of three layers `q`, `k` and `v`.
    """

    def __init__(self, dim: int, heads: int, *, bias: bool, causal: bool, dropout: float, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.rate, self.fused = heads, causal, dropout, fused
        self.dropout = nn.Dropout(dropout)
        if fused:
            self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        else:
            self.q = nn.Linear(dim, dim, bias=bias)
            self.k = nn.Linear(dim, dim, bias=bias)
            self.v = nn.Linear(dim, dim, bias=bias)
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        parts = self.qkv(tokens).chunk(3, dim=-1) if self.fused else (self.q(tokens), self.k(tokens), self.v(tokens))
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=self.heads) for part in parts)
        if self.training and self.rate:
            mixed = self.dropout(self._weights(q, k)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(rearrange(mixed, "b h t d -> b t (h d)"))

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return softmax(Q Kᵀ / √d), (batch, heads, length, length), for a separate dropout module."""
        scores = q @ k.mT / sqrt(q.shape[-1])
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -inf)
        return scores.softmax(dim=-1)


class FeedForward(nn.Module):
    """Two linear layers, dim → hidden → dim, with an activation in between, and timm's names."""

    def __init__(self, dim: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = activation
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (…, dim) to the same shape."""
        return self.fc2(self.act(self.fc1(tokens)))
