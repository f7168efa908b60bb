"""Turn the affine layers of any model into factorized ones, and back.

`shardable` decides which layers are sharded. `factorize` and the planner both ask it, so that what a client builds and
what the server cuts always agree.
"""

from sharding.factorization.replace import factorize, merge
from sharding.factorization.report import CoverageWarning, FactorizationReport, LayerReport
from sharding.factorization.shardable import ENDS, Pattern, Patterns, as_patterns, shardable_layers
from sharding.factorization.terms import Budget, Energy
from sharding.factorization.unpack import unpack_attention

__all__ = [
    "ENDS",
    "Budget",
    "CoverageWarning",
    "Energy",
    "FactorizationReport",
    "LayerReport",
    "Pattern",
    "Patterns",
    "as_patterns",
    "factorize",
    "merge",
    "shardable_layers",
    "unpack_attention",
]
