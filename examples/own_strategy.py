"""A strategy: every term is equally likely.

`python -m train run configs/quickstart.yaml --import examples.own_strategy strategy=even`
"""

import numpy as np

from sharding import STRATEGIES, Group, Law, Strategy


def even(group: Group) -> Law:
    """π = n/N for every term, ω = 1/π."""
    inclusion = np.full_like(group.magnitudes, group.num_terms / len(group.magnitudes))
    return Law(inclusion, 1 / inclusion)


STRATEGIES["even"] = Strategy("every term is equally likely", even, clips=True)
