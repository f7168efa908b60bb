"""A bound on one client's share of the weight of the updates that count, whatever size the client reports."""

from collections.abc import Mapping
from math import floor, frexp, ldexp

import torch

from sharding.rounds.aggregation.aggregate import Average, Outcome
from sharding.rounds.plan import Client, Plan
from sharding.rounds.shard import Update


class CappedAverage(Average):
    """An average that keeps the heaviest updates until the last has arrived, and then lowers their weights.

    No more than ⌊1/max_share⌋ updates are kept in memory, since no more clients can be above the share.

    Args:
        plan: as for `Average`.
        weights: likewise.
        total: likewise; it also shrinks in proportion to the weight that is taken away.
        max_share: the largest share of a client, in (0, 1).
    """

    def __init__(
        self, plan: Plan, weights: Mapping[Client, float] | None, total: float | None, max_share: float
    ) -> None:
        super().__init__(plan, weights, total)
        self._max_share = max_share
        self._kept: dict[Client, Update] = {}

    def _count(self, client: Client, update: Update) -> None:
        """Keep an update, and add the lightest one to the mean if more are kept than can be above the share."""
        self._kept[client] = update
        if len(self._kept) > floor(1 / self._max_share):
            lightest = min(self._kept, key=self._weights.__getitem__)  # of equal ones, the first to arrive
            super()._count(lightest, self._kept.pop(lightest))

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, torch.Tensor], Outcome]:
        """Lower the weights above the share, add the updates that are kept to the mean, and finish as `Average`."""
        counted = {c: weight for c, weight in self._weights.items() if c in self._received and c not in self._rejected}
        self._weights |= cap_weights(counted, self._max_share)
        for client, update in self._kept.items():
            super()._count(client, update)
        self._kept.clear()
        return super().finish()


def cap_weights(weights: Mapping[Client, float], max_share: float) -> dict[Client, float]:
    """Lower the largest weights to one level, so that no weight is above the share of their sum.

    Args:
        weights: positive. With too few clients for the share, all get the same weight.
        max_share: the share, in (0, 1).

    Returns:
        The weights; those below the level are unchanged to the bit.
    """
    exponent = frexp(max(weights.values(), default=0.0))[1]  # a sum of claims as they are could be infinite
    ordered = sorted(ldexp(weight, -exponent) for weight in weights.values())
    if not ordered or ordered[-1] <= max_share * sum(ordered):
        return dict(weights)
    level = ordered[0]
    for capped in range(1, len(ordered)):
        rest, left = ordered[:-capped], 1 - capped * max_share
        if left > 0 and rest[-1] <= (fair := max_share * sum(rest) / left):  # = share·(Σ rest + capped·fair)
            level = fair
        if left <= 0 or level > ordered[0]:
            break
    return {client: min(weight, ldexp(level, exponent)) for client, weight in weights.items()}
