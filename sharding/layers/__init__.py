"""Drop-in modules that hold a weight as U·Ω·Vᵀ, and attention whose projections can be such modules."""

from torch import nn

from sharding.layers.attention import UnpackedAttention
from sharding.layers.base import FactorizedLayer
from sharding.layers.conv import FactorizedConv2d
from sharding.layers.linear import FactorizedLinear
from sharding.layers.registry import dense_types, factorized_type, register

register(nn.Linear, FactorizedLinear)
register(nn.Conv2d, FactorizedConv2d)

__all__ = [
    "FactorizedConv2d",
    "FactorizedLayer",
    "FactorizedLinear",
    "UnpackedAttention",
    "dense_types",
    "factorized_type",
    "register",
]
