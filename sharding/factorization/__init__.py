"""Turn the affine layers of any model into factorized ones, and back.

One place decides which layers are sharded (`choose`); the planner asks the same place, so that what a client builds
and what the server cuts always agree.
"""

from sharding.factorization.choose import ENDS, as_patterns, rank_of, shardable_layers
from sharding.factorization.replace import factorize, factorize_empty, merge, num_terms, unpack_attention
from sharding.factorization.report import Report

__all__ = [
    "ENDS",
    "Report",
    "as_patterns",
    "factorize",
    "factorize_empty",
    "merge",
    "num_terms",
    "rank_of",
    "shardable_layers",
    "unpack_attention",
]
