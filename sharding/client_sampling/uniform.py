"""The plain samplers: some clients at random, all equally likely or in proportion to their data, or all of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sharding.client_sampling.base import (
    Client,
    Participation,
    Sampler,
    Vector,
    WithReplacement,
    uniform_cohort,
    upload_coins,
)
from sharding.designs import draw_terms
from sharding.errors import UserError
from sharding.inclusion import optimal_inclusion
from sharding.rng import generator


class UniformSampler(Sampler):
    """Invites `per_round` clients, every set equally likely, independently each round, and averages all of them.

    With replacement, `per_round` draws; each counts N D_j/(per_round·ΣD), which is unbiased.

    Raises:
        UserError: per_round is not in 1…num_clients.
    """

    name = "uniform"
    may_replace = True

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending."""
        if not self.replacement:
            return uniform_cohort(self.num_clients, self.per_round, self.seed, round)
        return self._draw(round).cohort

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Hear all."""
        if not self.replacement:
            return super().select(round, cohort, norms)
        return self._draw(round).heard(self.population.num_samples)

    def _draw(self, round: int) -> WithReplacement:
        q = np.full(self.num_clients, 1.0 / self.num_clients)
        return WithReplacement(q, self.per_round, generator(self.seed, "invite", round))


class UniformScaledSampler(UniformSampler):
    """Invites as `uniform` does, and has each client train with N D_c/ΣD times the step size; all count alike.

    To first order in the step size that is unbiased: a client with much data takes long steps, instead of counting
    much.

    Source: the uniform baseline in the code that Luo et al. 2024 (arXiv 2404.13804) released; their text has q = 1/N.
    """

    name = "uniform_scaled"
    may_replace = False

    @property
    def step_scales(self) -> Vector:
        """N D_c/ΣD, (N,)."""
        sizes = self.population.num_samples
        return self.num_clients * sizes / sizes.sum()

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Hear all, as the plain mean."""
        return Participation(dict.fromkeys(cohort, 1.0))


class UniformUploadSampler(Sampler):
    """The uniform baseline of two-stage sampling: of n invited, each uploads by a coin of its own, with p = m/n.

    It counts D_c n/m over the data of all n, whether they upload or not. As the coins ask for nothing, only those who
    will upload are sent a model and train; a round may be without any.

    Source: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723), Section 2 and Definition 11.
    """

    name = "uniform_upload"
    has_budget = True

    def invite(self, round: int) -> list[int]:
        """Return those of the `per_round` invited whose coin says yes, ascending: the coins that `ocs` throws."""
        coins = upload_coins(self.seed, round, self.num_clients)
        invited = uniform_cohort(self.num_clients, self.per_round, self.seed, round)
        return [client for client in invited if coins[client] < self.budget / self.per_round]

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Hear all of them."""
        sizes = self.population.num_samples
        invited = uniform_cohort(self.num_clients, self.per_round, self.seed, round)
        weights: dict[Client, float] = {c: float(sizes[c] * self.per_round / self.budget) for c in cohort}
        return Participation(weights, float(sizes[invited].sum()))


class WeightedSampler(Sampler):
    """Invites clients in proportion to their data, and corrects for it.

    With replacement, q_j = D_j/ΣD, so every draw counts the same. Without, `per_round` different clients by
    conditional Poisson sampling with inclusion π ∝ D (at most 1); client j counts D_j/(π_j ΣD) (Horvitz-Thompson).
    """

    name = "weighted"
    may_replace = True

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending."""
        rng = generator(self.seed, "invite", round)
        if self.replacement:
            return self._draw(round).cohort
        inclusion = optimal_inclusion(self.population.num_samples, self.per_round)
        return draw_terms(inclusion, rng=rng).tolist()

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Hear all."""
        sizes = self.population.num_samples
        if self.replacement:
            return self._draw(round).heard(sizes)
        inclusion = optimal_inclusion(sizes, self.per_round)
        weights: dict[Client, float] = {j: float(sizes[j] / inclusion[j]) for j in cohort}
        return Participation(weights, float(sizes.sum()))

    def _draw(self, round: int) -> WithReplacement:
        shares = self.population.num_samples / self.population.num_samples.sum()
        return WithReplacement(shares, self.per_round, generator(self.seed, "invite", round))


class FullSampler(UniformSampler):
    """Invites every client every round; `per_round` says how many there are, or is an error.

    Raises:
        UserError: per_round is not num_clients.
    """

    name = "full"
    may_replace = False

    def __init__(self, num_clients: int, per_round: int, *arguments: Any, **options: Any) -> None:
        if per_round != num_clients:
            raise UserError(
                f"clients.sampler=full invites all {num_clients} clients; set clients.per_round={num_clients}"
            )
        super().__init__(num_clients, per_round, *arguments, **options)
