"""Drop-in modules that hold a weight as U·Ω·Vᵀ, and attention whose projections can be such modules."""

from sharding.layers.attention import UnpackedAttention
from sharding.layers.base import FactorizedLayer
from sharding.layers.conv import FactorizedConv2d
from sharding.layers.linear import FactorizedLinear

__all__ = ["FactorizedConv2d", "FactorizedLayer", "FactorizedLinear", "UnpackedAttention"]
