"""Turn the affine layers of any model into factorized ones, and back.

`select` decides which layers are sharded. `factorize` and the planner both call it, so that what a client builds and
what the server cuts always agree.
"""

from sharding.factorization.replace import factorize, factorize_empty, merge
from sharding.factorization.report import CoverageWarning, LayerReport, Report
from sharding.factorization.select import ENDS, Pattern, Patterns, as_patterns, shardable_layers
from sharding.factorization.terms import Budget, Energy, num_terms
from sharding.factorization.unpack import split_layers, unpack_attention

__all__ = [
    "ENDS",
    "Budget",
    "CoverageWarning",
    "Energy",
    "LayerReport",
    "Pattern",
    "Patterns",
    "Report",
    "as_patterns",
    "factorize",
    "factorize_empty",
    "merge",
    "num_terms",
    "shardable_layers",
    "split_layers",
    "unpack_attention",
]
