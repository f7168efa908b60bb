"""Guards against updates that are finite but wrong: a bound on their length, and one on a client's share of the weight.

A guard compares the updates of a round. So an average with guards keeps those that it may have to leave out, or to
weigh less, until the last has arrived.
"""

from collections.abc import Mapping, Sequence
from math import floor, frexp, inf, ldexp

import torch

from sharding.errors import UserError, safe_repr
from sharding.rounds.aggregation.aggregate import Average, Outcome
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.norms import statistics_norm, update_norm
from sharding.rounds.plan import Client, Plan
from sharding.rounds.shard import Update
from sharding.validation import is_number


class Guard:
    """The base of guards. Those that reject updates come before those that change weights, in any list.

    Attributes:
        num_kept: the most updates that it keeps until the last has arrived, those of the largest weights.
    """

    num_kept: float

    def reject(self, plan: Plan, updates: Mapping[Client, Update]) -> dict[Client, Failure]:
        """Return which of the kept updates are left out, and why."""
        return {}

    def reweigh(self, weights: Mapping[Client, float]) -> dict[Client, float]:
        """Return the weights with which clients count, from those of all whose update is averaged in."""
        return dict(weights)


class NormBound(Guard):
    """Leaves out long updates; all updates of a round are kept in memory.

    The norm of an update may be this many times the (lower) median of the round's norms above 0. Running statistics of
    batch norms have a norm and a median of their own.

    Args:
        bound: at least 1.

    Raises:
        UserError: the bound is below 1 or not finite.
    """

    num_kept = inf

    def __init__(self, bound: float) -> None:
        if not (is_number(bound) and bound >= 1):
            raise UserError(f"norm_bound is {safe_repr(bound)}; pass a finite number of at least 1, such as 5")
        self.bound = bound

    def reject(self, plan: Plan, updates: Mapping[Client, Update]) -> dict[Client, Failure]:
        """Return the clients whose change, of what trains or of running statistics, is longer than the bound."""
        norms, too_long = {}, dict[Client, Failure]()
        for client, update in updates.items():
            sent = plan.shard(client)
            norms[client] = update_norm(sent, update), statistics_norm(sent, update)
        for column, whose in enumerate(("update", "running statistics")):
            lengths = {client: float(norms[client][column]) for client in updates if client not in too_long}
            moved = torch.tensor([length for length in lengths.values() if length > 0], dtype=torch.float64)
            median = float(moved.median()) if len(moved) else 0.0  # the lower one: of two, the one that changed less
            for client, length in lengths.items():
                if length > self.bound * median:
                    reason = f"{length:.3g}, is above {self.bound:g} times the median {median:.3g}"
                    too_long[client] = Failure(Kind.TOO_LONG, f"the norm of its {whose}, {reason}")
        return too_long


class MaxShare(Guard):
    """Bounds one client's share of the weight of the updates that count, whatever size the client reports.

    The ⌊1/share⌋ heaviest updates are kept in memory, since no more clients can be above the share.

    Args:
        share: in (0, 1]; 1 for no bound.

    Raises:
        UserError: the share is outside (0, 1].
    """

    def __init__(self, share: float) -> None:
        if not (is_number(share) and 0 < share <= 1):
            raise UserError(f"max_share is {safe_repr(share)}; pass a number above 0 and at most 1, such as 0.5")
        self.share = share
        self.num_kept = floor(1 / share) if share < 1 else 0

    def reweigh(self, weights: Mapping[Client, float]) -> dict[Client, float]:
        """Lower the largest weights to one level, so that no weight is above the share of their sum.

        Args:
            weights: positive. With too few clients for the share, all get the same weight.

        Returns:
            The weights; those below the level are unchanged to the bit.
        """
        exponent = frexp(max(weights.values(), default=0.0))[1]  # a sum of claims as they are could be infinite
        ordered = sorted(ldexp(weight, -exponent) for weight in weights.values())
        if self.share == 1 or not ordered or ordered[-1] <= self.share * sum(ordered):
            return dict(weights)
        level = ordered[0]
        for capped in range(1, len(ordered)):
            rest, left = ordered[:-capped], 1 - capped * self.share
            if left > 0 and rest[-1] <= (fair := self.share * sum(rest) / left):  # = share·(Σ rest + capped·fair)
                level = fair
            if left <= 0 or level > ordered[0]:
                break
        return {client: min(weight, ldexp(level, exponent)) for client, weight in weights.items()}


class GuardedAverage(Average):
    """An average that keeps the updates that its guards compare until the last has arrived.

    Args:
        plan: as for `Average`.
        weights: likewise.
        total: likewise; it also shrinks in proportion to the weight that guards take away.
        guards: at least one.
    """

    def __init__(
        self, plan: Plan, weights: Mapping[Client, float] | None, total: float | None, guards: Sequence[Guard]
    ) -> None:
        super().__init__(plan, weights, total)
        self._guards, self._num_kept = guards, max(guard.num_kept for guard in guards)
        self._kept: dict[Client, Update] = {}

    def _count(self, client: Client, update: Update) -> None:
        """Keep an update, and add the lightest one to the mean if more are kept than a guard needs."""
        self._kept[client] = update
        if len(self._kept) > self._num_kept:
            lightest = min(self._kept, key=self._weights.__getitem__)  # of equal ones, the first to arrive
            super()._count(lightest, self._kept.pop(lightest))

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, torch.Tensor], Outcome]:
        """Let the guards compare the updates, add those that are kept to the mean, and finish as `Average`."""
        for guard in self._guards:
            for client, failure in guard.reject(self._plan, self._kept).items():
                self._rejected[client] = failure
                del self._kept[client]
        weights = {c: weight for c, weight in self._weights.items() if c in self._received and c not in self._rejected}
        for guard in self._guards:
            weights = guard.reweigh(weights)
        self._weights |= weights
        for client, update in self._kept.items():
            super()._count(client, update)
        self._kept.clear()
        return super().finish()
