"""Drop-in modules that hold a weight as U·Ω·Vᵀ, and attention whose projections can be such modules."""

from torch import nn

from sharding.layers.attention import UnpackedAttention
from sharding.layers.base import FactorizedLayer, as_blocks, num_blocks
from sharding.layers.conv import FactorizedConv, FactorizedConvTranspose
from sharding.layers.embedding import FactorizedEmbedding, padding_row
from sharding.layers.linear import FactorizedLinear, FactorizedTransposedLinear
from sharding.layers.registry import factorized_type, is_affine, is_on_demand, register_layer

for kind in (FactorizedLinear, FactorizedConv, FactorizedConvTranspose):
    for dense_type in kind.made_from:
        register_layer(dense_type, kind)
register_layer(nn.Embedding, FactorizedEmbedding, on_demand=True)

__all__ = [
    "FactorizedConv",
    "FactorizedConvTranspose",
    "FactorizedEmbedding",
    "FactorizedLayer",
    "FactorizedLinear",
    "FactorizedTransposedLinear",
    "UnpackedAttention",
    "as_blocks",
    "factorized_type",
    "is_affine",
    "is_on_demand",
    "num_blocks",
    "padding_row",
    "register_layer",
]
