"""A bound on one client's share of a round's weight, whatever size the client reports."""

from collections.abc import Mapping
from math import frexp, ldexp

from sharding.rounds.plan import Client


def cap_shares(weights: Mapping[Client, float], most: float) -> dict[Client, float]:
    """Lower the largest weights to one level, so that no weight is above a share of their sum.

    Args:
        weights: positive.
        most: the share, in (0, 1]; 1 for no bound. With too few clients for it, all get the same weight.

    Returns:
        The weights; those below the level are unchanged to the bit.
    """
    exponent = frexp(max(weights.values(), default=0.0))[1]  # a sum of claims as they are could be infinite
    ordered = sorted(ldexp(weight, -exponent) for weight in weights.values())
    if most == 1 or not ordered or ordered[-1] <= most * sum(ordered):
        return dict(weights)
    level = ordered[0]
    for capped in range(1, len(ordered)):
        rest, left = ordered[:-capped], 1 - capped * most
        if left > 0 and rest[-1] <= (fair := most * sum(rest) / left):  # fair = most·(Σ rest + capped·fair)
            level = fair
        if left <= 0 or level > ordered[0]:
            break
    return {client: min(weight, ldexp(level, exponent)) for client, weight in weights.items()}
