"""A strategy: every term is equally likely.

`python -m train run configs/quickstart.yaml --import examples.own_strategy strategy=even`
"""

import numpy as np

from sharding import STRATEGIES, Allocation, LayerContext, Strategy


def even(layer: LayerContext) -> Allocation:
    """π = n/N for every term, ω = 1/π."""
    inclusion = np.full_like(layer.magnitudes, layer.num_terms / len(layer.magnitudes))
    return Allocation(inclusion, 1 / inclusion)


STRATEGIES["even"] = Strategy("every term is equally likely", even)
