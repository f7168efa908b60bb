"""AOCS at the server: the totals of a round, and no node's norm.

A node that is lost between two exchanges is missing in the next total, so that those who are left begin again. Who
sends its update can be held to what it drew: the update's own norm gives its probability, by the same totals.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from flwr.app import RecordDict

from sharding import Plan
from sharding.clients import Heard, Sampler, plain_sum
from sharding.clients.aocs import Totals
from sharding.clients.factors import factors_of_sums
from sharding.clients.optimal import REPORT_BYTES, reject
from sharding.planner import Client
from train.federate.reports import Ballot, Report


@dataclass(frozen=True)
class Vote:
    """Who of a round's nodes uploads, as far as it is settled.

    Attributes:
        plan: of the round, its name.
        sizes: D_c of those who vote.
        budget: m.
        rejected: whose report could not be used, and why.
        totals: so far; None where a report could not be used, so that all others upload with equal probability.
    """

    plan: str
    sizes: Mapping[Client, float]
    budget: float
    rejected: Mapping[Client, str]
    totals: Sequence[Totals] | None

    @classmethod
    def open(cls, sampler: Sampler, plan: Plan, round: int, reports: Mapping[Client, Report]) -> Self:
        """Return the vote of those who have reported."""
        rejected = reject({c: its.norm for c, its in reports.items() if its.norm is not None}, round)
        name = next(iter(plan.values())).plan
        sizes = {c: float(sampler.population.num_samples[int(c)]) for c in plan if c in reports and c not in rejected}
        return cls(name, sizes, sampler.budget, rejected, None if rejected else ())

    @property
    def is_undecided(self) -> bool:
        """Whether another exchange is needed."""
        return bool(self.sizes) and isinstance(self._ballot(0.0).part(), tuple)

    def ballots(self) -> dict[Client, RecordDict]:
        """Return what the voters are told."""
        return {client: self._ballot(self._share(client)).to_record() for client in self.sizes}

    def added(self, numbers: Mapping[Client, Sequence[float]]) -> Self:
        """Return the vote with another exchange's totals."""
        assert self.totals is not None
        columns = np.array([numbers[client] for client in self.sizes]).T
        bad, total = (plain_sum(column) for column in columns)
        return replace(self, totals=[*self.totals, (bad, total)])

    def among(self, left: Container[Client]) -> Self:
        """Return the vote of those who are left, which begins again."""
        sizes = {client: size for client, size in self.sizes.items() if client in left}
        return replace(self, sizes=sizes, totals=None if self.totals is None else ())

    def probability(self, client: Client, norm: float) -> float:
        """Return p of a voter whose norm is known, once it is settled."""
        part = self._ballot(self._share(client)).part(norm)
        assert not isinstance(part, tuple)
        return float(part[0])

    def close(self, sums: Mapping[Client, Sequence[float]], norms: Mapping[Client, float]) -> Heard:
        """Return who is heard.

        Args:
            sums: p, u² and u²(1/p − 1) of those who answered; who did not is as one who was not there.
            norms: of the updates that are to be heard.
        """
        if not sums:
            return Heard({}, 1.0, self.rejected)
        weights: dict[Client, float] = {c: self.sizes[c] / self.probability(c, norm) for c, norm in norms.items()}
        budget, squares, variance = (float(column.sum()) for column in np.array([sums[c] for c in sums]).T)
        alpha, gamma = factors_of_sums(len(sums), budget, squares, variance)
        metrics = {"improvement_alpha": alpha, "improvement_gamma": gamma}
        return Heard(weights, sum(self.sizes[c] for c in sums), self.rejected, metrics, REPORT_BYTES * self._numbers())

    def _numbers(self) -> int:
        """Return how many numbers the nodes have sent."""
        if self.totals is None:
            return len(self.sizes) + len(self.rejected)
        return 2 * len(self.totals) * len(self.sizes)

    def _share(self, client: Client) -> float:
        return self.sizes[client] / sum(self.sizes.values())

    def _ballot(self, share: float) -> Ballot:
        count = len(self.sizes)
        return Ballot(self.plan, share, min(self.budget, count), count, self.totals)
