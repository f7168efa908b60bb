"""Samplers that select clients before training: uniformly, or in proportion to their data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sharding.client_sampling.sampler import (
    BudgetSampler,
    Participation,
    Sampler,
    WithReplacement,
    uniform_cohort,
    upload_coins,
)
from sharding.rng import generator
from sharding.rounds.plan import Client
from sharding.terms.designs import fit
from sharding.terms.designs.design import Design
from sharding.terms.inclusion import optimal_inclusion
from sharding.validation import Vector


@dataclass(eq=False, repr=False)
class UniformSampler(Sampler):
    """Invites `per_round` clients, every set equally likely, independently each round, and averages all of them.

    With replacement it makes `per_round` draws. Each draw of client j counts N D_j/(per_round·ΣD), which is unbiased.

    Attributes:
        replacement: whether a client can be drawn several times in a round.
    """

    name = "uniform"

    replacement: bool = field(default=False, kw_only=True)

    def distribution(self) -> Vector:
        """Return q, the probabilities of one draw with replacement, (N,)."""
        return np.full(self.num_clients, 1.0 / self.num_clients)

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending."""
        return self._draw(round).cohort if self.replacement else super().invite(round)

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Select the whole cohort."""
        if not self.replacement:
            return super().select(round, cohort, norms)
        return self._draw(round).participation(self.population.num_samples)

    def _draw(self, round: int) -> WithReplacement:
        return WithReplacement(self.distribution(), self.per_round, generator(self.seed, "invite", round))


class WeightedSampler(UniformSampler):
    """Invites clients in proportion to their data, and corrects for it.

    With replacement, q_j = D_j/ΣD, so every draw counts the same. Without, it draws `per_round` different clients by
    conditional Poisson sampling with inclusion π ∝ D (at most 1); client j counts D_j/(π_j ΣD) (Horvitz-Thompson).
    Clients without data are never invited, and so a round can have fewer.
    """

    name = "weighted"

    def distribution(self) -> Vector:
        """Return D/ΣD, (N,)."""
        return self.population.num_samples / self.population.num_samples.sum()

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending."""
        if self.replacement:
            return super().invite(round)
        return self._design.draw(generator(self.seed, "invite", round)).tolist()

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Select the whole cohort."""
        if self.replacement:
            return super().select(round, cohort, norms)
        sizes, inclusion = self.population.num_samples, self._inclusion
        weights: dict[Client, float] = {j: float(sizes[j] / inclusion[j]) for j in cohort}
        return Participation(weights, float(sizes.sum()))

    @cached_property
    def _inclusion(self) -> Vector:
        sizes = self.population.num_samples
        return optimal_inclusion(sizes, min(self.per_round, int(np.count_nonzero(sizes))))

    @cached_property
    def _design(self) -> Design:
        return fit(self._inclusion)  # takes seconds for 100,000 clients


class PoissonSampler(Sampler):
    """Invites each client by a coin of its own, with the chance per_round/N, and averages all of their updates.

    So `per_round` is the expected number of clients, and a round can have none. The accounts of differential privacy
    are tightest for this draw (`sharding.Gaussian`).
    """

    name = "poisson"

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending."""
        coins = generator(self.seed, "invite", round).random(self.num_clients)
        return np.flatnonzero(coins < self.per_round / self.num_clients).tolist()


class UniformScaledSampler(Sampler):
    """Invites as `uniform` does, but client c trains with N D_c/ΣD times the step size; all updates count alike.

    This is unbiased to first order in the step size: a client with much data takes longer steps instead of a larger
    weight.

    Source: the uniform baseline in the code that Luo et al. 2024 (arXiv 2404.13804) released; their text has q = 1/N.
    """

    name = "uniform_scaled"

    @property
    def lr_scales(self) -> Vector:
        """N D_c/ΣD, (N,)."""
        sizes = self.population.num_samples
        return self.num_clients * sizes / sizes.sum()

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Select the whole cohort, for the plain mean."""
        return Participation(dict.fromkeys(cohort, 1.0))


class UniformUploadSampler(BudgetSampler):
    """The uniform baseline of two-stage sampling: each of n invited clients uploads by its own coin, with p = m/n.

    It counts D_c n/m over the data of all n, whether they upload or not. Since the coins need no norm, only clients
    that will upload receive a model and train. A round may have no client.

    Source: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723), Section 2 and Definition 11.
    """

    name = "uniform_upload"

    def invite(self, round: int) -> list[int]:
        """Return the invited clients whose coin falls below p, ascending; `ocs` uses the same uniform draws."""
        coins = upload_coins(self.seed, round, self.num_clients)
        return [client for client in self._invited(round) if coins[client] < self.budget / self.per_round]

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Select the whole cohort."""
        sizes = self.population.num_samples
        weights: dict[Client, float] = {c: float(sizes[c] * self.per_round / self.budget) for c in cohort}
        return Participation(weights, float(sizes[self._invited(round)].sum()) or 1.0)  # without data nothing counts

    def _invited(self, round: int) -> list[int]:
        return uniform_cohort(self.num_clients, self.per_round, self.seed, round)
