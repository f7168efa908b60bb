"""Samplers that draw clients by the norms of their updates, with or without regard to a round's seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sharding.client_sampling.sampler import Participation, Sampler, WithReplacement
from sharding.client_sampling.wireless import statistical_probabilities, wireless_probabilities
from sharding.errors import UserError, safe_repr
from sharding.rng import generator
from sharding.rounds.plan import Client
from sharding.validation import Vector, is_number


class StatisticalSampler(Sampler):
    """Draws `per_round` times with replacement by q ∝ D·G: the fewest rounds, however long they take.

    The sampler learns G_c during the run: the norm of client c's latest update over the step size, or the largest norm
    seen if c was never drawn. This is G_c times the number of steps, so that D·G minimizes the variance of the
    aggregate even where clients take different numbers of steps. Norms come with the uploads and cost nothing; a norm
    that is NaN or infinite is ignored. Pilots can measure G before the run instead, as in the paper.

    Source: Luo et al. 2024 (arXiv 2404.13804), the baseline of Section VI, and its tracking of G.
    """

    name = "statistical"
    needs_norms = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._norms = np.full(self.num_clients, np.nan)
        self._taught = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return `gradient_norms`, the latest norms, (N,), NaN for clients that were never drawn."""
        return {"gradient_norms": torch.from_numpy(self._norms.copy())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the norms that another sampler had learned; raise a UserError unless there is one for each client."""
        norms = state.get("gradient_norms")
        if norms is None or norms.shape != (self.num_clients,):
            raise UserError("the gradient_norms are not one per client")
        self._norms = norms.numpy().copy()

    def learn(self, gradient_norms: Vector) -> None:
        """Set G, (N,), from pilots; it no longer changes."""
        self._norms, self._taught = gradient_norms.copy(), True

    def invite(self, round: int) -> list[int]:
        """Return the clients drawn, ascending."""
        return self._draw(round).cohort

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Select every client that was drawn, and learn from their norms unless pilots have set G."""
        drawn = self._draw(round)  # as in `invite`, since q changes only below
        for client, norm in norms.items():
            if np.isfinite(norm) and norm > 0 and not self._taught:
                self._norms[int(client)] = norm
        return drawn.participation(self.population.num_samples)

    def _draw(self, round: int) -> WithReplacement:
        return WithReplacement(self.probabilities(), self.per_round, generator(self.seed, "invite", round))

    def probabilities(self) -> Vector:
        """Return q, (N,)."""
        return statistical_probabilities(self._shares(), self._known_norms())

    def _shares(self) -> Vector:
        return self.population.num_samples / self.population.num_samples.sum()

    def _known_norms(self) -> Vector:
        known = np.isfinite(self._norms)
        return np.where(known, self._norms, self._norms[known].max() if known.any() else 1.0)


@dataclass(eq=False, repr=False)
class WirelessSampler(StatisticalSampler):
    """Draws with the q that minimizes the expected time to the wanted loss: problem P3, solved exactly.

    Attributes:
        beta_over_alpha: β/α, in the units of the G² that is learned, (steps·G)². None, until it has been measured,
            counts as 0.

    Raises:
        UserError: `beta_over_alpha` is not finite or below 0, or the population has no profiles.

    Source: Luo et al. 2024 (arXiv 2404.13804).
    """

    name = "wireless"

    beta_over_alpha: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = self.beta_over_alpha
        if ratio is not None and not (is_number(ratio) and ratio >= 0):
            raise UserError(f"beta_over_alpha is {safe_repr(ratio)}; a finite number from 0 is needed")
        if self.population.profiles is None:
            raise UserError(f"the sampler {self.name} needs the clients' speeds; pass a population with profiles")

    def probabilities(self) -> Vector:
        """Return q, (N,)."""
        profiles = self.population.profiles
        assert profiles is not None
        costs = profiles.costs(self.per_round)
        return wireless_probabilities(
            self._shares(), self._known_norms(), costs, self.beta_over_alpha or 0.0, self.per_round
        )
