"""Who works for which of several models in a round (MMFL); each client for at most one."""

import logging

import numpy as np
from numpy.typing import NDArray

from sharding.client_sampling.base import Sampler, uniform_cohort, upload_coins
from sharding.client_sampling.mmfl import mmfl_probabilities
from sharding.errors import UserError, shown

log = logging.getLogger(__name__)

Matrix = NDArray[np.float64]
SIGNALS = ("norm", "loss", "round_robin", "uniform", "full")


class TaskSampler(Sampler):
    """Draws for every client a model to send an update of, or none, independently: m updates a round are expected.

    The signal says how likely: optimally by the norms of the updates (every client trains every model), or by the
    losses (every client evaluates every model, and only those drawn train). Or, to compare with: all clients alike,
    each for one model after the other, so that every model is trained in every round (`round_robin`); all pairs alike
    (`uniform`); and the bound on what any sampling can reach, every client sending every model (`full`), whatever the
    budget. Client i counts d_is/p_{s|i} for model s.

    Source: Zhang et al. 2024, "Optimal Variance-Reduced Client Sampling for Multiple Models Federated Learning".
    """

    name = "mmfl"
    asks = has_budget = chooses_tasks = True

    @property
    def needs_norms(self) -> bool:
        """Whether all clients must have trained all models before any is drawn."""
        return self.signal in (None, "norm")

    def invite(self, round: int) -> list[int]:
        """Return the clients that may be drawn this round: `per_round`, every set equally likely, ascending."""
        return uniform_cohort(self.num_clients, self.per_round, self.seed, round)

    def probabilities(self, round: int, signals: Matrix) -> Matrix:
        """Return p_{s|i}, (n, S), from the signals d_is·norm or d_is·loss of the cohort, (n, S).

        A client with a signal that is NaN, infinite or negative is left out, and named in the log; the rest are drawn
        alike.
        """
        usable = (np.isfinite(signals) & (signals >= 0)).all(axis=1)
        if not usable.all():
            bad = np.flatnonzero(~usable).tolist()
            log.warning("clients in places %s of the cohort reported no number in round %d", shown(bad), round)
            p = np.zeros(signals.shape)
            n = int(usable.sum())
            p[usable] = min(self.budget, n) / max(n * signals.shape[1], 1)
            return p
        (n, models), budget = signals.shape, min(self.budget, len(signals))
        if self.signal == "round_robin":
            return (np.arange(models) == (np.arange(n)[:, None] + round) % models) * (budget / n)
        if self.signal == "full":
            return np.ones((n, models))
        if self.signal == "uniform":
            return np.full((n, models), budget / (n * models))
        return mmfl_probabilities(signals, budget)

    def assign(self, round: int, cohort: list[int], probabilities: Matrix) -> list[dict[int, float]]:
        """Draw, and return for each model who sends it an update, with 1/p of each."""
        if self.signal == "full":
            return [dict.fromkeys(cohort, 1.0) for _ in range(probabilities.shape[1])]
        coins = upload_coins(self.seed, round, self.num_clients)[cohort]
        ends = np.cumsum(probabilities, axis=1)
        task = (coins[:, None] >= ends).sum(axis=1)  # as many as there are models: none
        return [
            {cohort[i]: 1.0 / float(probabilities[i, s]) for i in np.flatnonzero(task == s)}
            for s in range(probabilities.shape[1])
        ]

    def _refuse_what_does_nothing(self) -> None:
        super()._refuse_what_does_nothing()
        if self.signal is not None and self.signal not in SIGNALS:
            raise UserError(f"clients.signal is {self.signal!r}; choose one of: {', '.join(SIGNALS)}")
