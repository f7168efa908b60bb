"""The samplers that know what a round costs in seconds: time-optimal draws, and the same without regard to time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.client_sampling.base import Client, Participation, Sampler, WithReplacement
from sharding.client_sampling.wireless import statistical_probabilities, wireless_probabilities
from sharding.errors import UserError
from sharding.rng import generator

Vector = NDArray[np.float64]


class StatisticalSampler(Sampler):
    """Draws `per_round` times with replacement by q ∝ D·G: the fewest rounds, whatever they take (κ → ∞).

    G_c is learned on the way: the norm of client c's latest update over the step size, and for a client that was never
    drawn the largest norm seen. That is G_c times the number of steps, by which D·G is what the variance of the
    aggregate asks for even where clients take different numbers of steps. Norms come with the uploads and cost
    nothing; one that is NaN or infinite is ignored. Or pilots teach G beforehand, as in the paper.

    Source: Luo et al. 2024 (arXiv 2404.13804), the baseline of Section VI, and its tracking of G.
    """

    name = "statistical"
    asks = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._norms = np.full(self.num_clients, np.nan)
        self._drawn: tuple[int, WithReplacement] | None = None
        self._taught = False

    @property
    def gradient_norms(self) -> Vector | None:
        """(N,) latest norms, NaN for clients that were never drawn."""
        return self._norms

    def restore(self, gradient_norms: Vector) -> None:
        """Take up the norms that an earlier run had learned."""
        self._norms = gradient_norms.copy()

    def learn(self, gradient_norms: Vector) -> None:
        """Take G, (N,), from pilots: from now on it does not change."""
        self._norms, self._taught = gradient_norms.copy(), True

    def invite(self, round: int) -> list[int]:
        """Return the clients drawn, ascending."""
        drawn = WithReplacement(self.probabilities(), self.per_round, generator(self.seed, "invite", round))
        self._drawn = round, drawn
        return drawn.cohort

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Hear all who were drawn, and learn from their norms what no pilot taught.

        Raises:
            UserError: the round is not the one of the latest `invite`: q has changed since.
        """
        if self._drawn is None or self._drawn[0] != round:
            last = "no round" if self._drawn is None else f"round {self._drawn[0]}"
            raise UserError(f"round {round} cannot be heard: the sampler {self.name} has invited {last} last")
        for client, norm in norms.items():
            if np.isfinite(norm) and norm > 0 and not self._taught:
                self._norms[int(client)] = norm
        return self._drawn[1].heard(self.population.num_samples)

    def probabilities(self) -> Vector:
        """Return q, (N,)."""
        return statistical_probabilities(self._shares(), self._known_norms())

    def _shares(self) -> Vector:
        return self.population.num_samples / self.population.num_samples.sum()

    def _known_norms(self) -> Vector:
        known = np.isfinite(self._norms)
        return np.where(known, self._norms, self._norms[known].max() if known.any() else 1.0)


class WirelessSampler(StatisticalSampler):
    """Draws by the q that minimizes the expected time to the wanted loss: problem P3, solved exactly.

    `beta_over_alpha` is in the units of the G² that is learned, (steps·G)².

    Source: Luo et al. 2024 (arXiv 2404.13804).
    """

    name = "wireless"
    timed = True

    def probabilities(self) -> Vector:
        """Return q, (N,)."""
        profiles = self.population.profiles
        assert profiles is not None
        costs = profiles.costs(self.per_round)
        return wireless_probabilities(self._shares(), self._known_norms(), costs, self.beta_over_alpha, self.per_round)
