"""A bound on the share of a round's weight that one client can have, whatever it says of its size."""

from collections.abc import Mapping

from sharding.planner import Client


def cap_shares(weights: Mapping[Client, float], most: float) -> dict[Client, float]:
    """Lower the largest weights to one level, at which none is above a share of their sum.

    Args:
        weights: positive.
        most: that share, in (0, 1]; 1 for no bound. Where there are too few clients for it, all weigh the same.

    Returns:
        The weights; those that are not too large as they were, with the same bits.
    """
    ordered = sorted(weights.values())
    if most == 1 or not ordered or ordered[-1] <= most * sum(ordered):
        return dict(weights)
    level = ordered[0]
    for capped in range(1, len(ordered)):
        rest, left = ordered[:-capped], 1 - capped * most
        if left > 0 and rest[-1] <= (fair := most * sum(rest) / left):  # fair = most·(Σ rest + capped·fair)
            level = fair
        if left <= 0 or level > ordered[0]:
            break
    return {client: min(weight, level) for client, weight in weights.items()}
