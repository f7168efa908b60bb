"""A strategy: every term is equally likely.

`python -m train run configs/quickstart.yaml --import examples.own_strategy strategy=even`
"""

import numpy as np

from sharding import STRATEGIES, Allocation, LayerContext, Strategy


def even(group: LayerContext) -> Allocation:
    """π = n/N for every term, ω = 1/π."""
    inclusion = np.full_like(group.magnitudes, group.num_terms / len(group.magnitudes))
    return Allocation(inclusion, 1 / inclusion)


STRATEGIES["even"] = Strategy("every term is equally likely", even, clips=True)
