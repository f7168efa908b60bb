"""Compact Convolutional Transformer CCT-6/3x2: a transformer that small images can train from scratch.

Two convolutions turn an image into a short sequence of overlapping patches, so that the transformer need not
learn locality; there is no class token: the outputs are averaged with learned weights ("sequence pooling").

Hassani et al., "Escaping the Big Data Paradigm with Compact Transformers", 2021 (arXiv 2104.05704), Section
3, and the authors' implementation for what the paper leaves open: no bias in q, k and v, the order of the
norms, dropout on attention only, initial scales.
"""

from math import ceil

import torch
from torch import Tensor, nn

from models.attention import FeedForward, SelfAttention
from models.options import fraction, positive
from sharding.errors import UserError


class CCT(nn.Module):
    """CCT-6/3x2 by default: 6 layers over the output of two 3x3 convolutions.

    Args:
        input_shape: (channels, height, width) of an image; each convolution halves height and width, rounding
            up.
        num_classes: number of logits.
        dim: width of the sequence.
        depth: number of transformer layers.
        heads: the number of attention heads; must divide `dim`.
        mlp_ratio: hidden width of the feed-forward part, over `dim`.
        attention_dropout: dropout on attention weights.
        stochastic_depth: rate at which the last layer's branches are skipped for an image; it rises linearly
            from 0.
        fused_qkv: q, k and v of an attention are one layer, as in the authors' code.

    Raises:
        UserError: the input is not an image, a number is out of range, or `heads` does not divide `dim`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        dim: int = 256,
        depth: int = 6,
        heads: int = 4,
        mlp_ratio: int = 2,
        attention_dropout: float = 0.1,
        stochastic_depth: float = 0.1,
        fused_qkv: bool = False,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise UserError(f"cct_6_3x2 reads images (channels, height, width), not inputs of shape {input_shape}")
        positive(dim=dim, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
        fraction(attention_dropout=attention_dropout, stochastic_depth=stochastic_depth)
        if dim % heads:
            raise UserError(f"heads={heads} does not divide dim={dim}; choose a divisor of {dim}")
        channels, height, width = input_shape
        skips = torch.linspace(0, stochastic_depth, depth).tolist()
        self.tokenizer = nn.Sequential(*_conv_pool(channels, 64), *_conv_pool(64, dim))
        self.positions = nn.Parameter(torch.empty(ceil(height / 4) * ceil(width / 4), dim))
        self.layers = nn.Sequential(
            *(Layer(dim, heads, mlp_ratio, attention_dropout, skip, fused_qkv) for skip in skips)
        )
        self.norm = nn.LayerNorm(dim)
        self.pool = nn.Linear(dim, 1)
        self.fc = nn.Linear(dim, num_classes)
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (batch, channels, height, width) to logits (batch, num_classes)."""
        tokens = self.tokenizer(images).flatten(2).mT + self.positions
        tokens = self.norm(self.layers(tokens))
        weights = self.pool(tokens).softmax(dim=1)  # (batch, length, 1): how much each place counts
        return self.fc((weights * tokens).sum(dim=1))

    def _initialize(self) -> None:
        """Truncated normal of scale 0.02 for linear layers and 0.2 for positions, He-normal convolutions."""
        nn.init.trunc_normal_(self.positions, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class Layer(nn.Module):
    """Attention, then a feed-forward part, each added to its input unless skipped (stochastic depth).

    As in the authors' code, the second norm acts on the sum itself, not only inside the feed-forward branch.
    """

    def __init__(
        self, dim: int, heads: int, mlp_ratio: int, attention_dropout: float, skip: float, fused_qkv: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, bias=False, causal=False, dropout=attention_dropout, fused=fused_qkv)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = FeedForward(dim, mlp_ratio * dim, nn.GELU())
        self.skip = DropPath(skip)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        tokens = self.norm2(tokens + self.skip(self.attention(self.norm1(tokens))))
        return tokens + self.skip(self.mlp(tokens))


class DropPath(nn.Module):
    """Zeroes a branch for some images in training, and scales it for the others: stochastic depth.

    Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016 (arXiv 1603.09382); here for each image by itself.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        if not (self.training and self.rate):
            return branch
        kept = branch.new_empty(len(branch), 1, 1).bernoulli_(1 - self.rate)
        return branch * kept.div_(1 - self.rate)


def _conv_pool(before: int, after: int) -> tuple[nn.Module, ...]:
    """One step of the tokenizer: convolve, rectify, halve."""
    conv = nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
    return conv, nn.ReLU(), nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
