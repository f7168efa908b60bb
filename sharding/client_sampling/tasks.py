"""Sampling for several models (MMFL): in a round each client sends an update of at most one model."""

import logging

import numpy as np
from numpy.typing import NDArray

from sharding.client_sampling.base import BudgetSampler, Population, upload_coins
from sharding.client_sampling.mmfl import mmfl_probabilities
from sharding.errors import UserError, shown

log = logging.getLogger(__name__)

Matrix = NDArray[np.float64]
SIGNALS = ("norm", "loss", "round_robin", "uniform", "full")


class TaskSampler(BudgetSampler):
    """Draws for each client independently the model of which it sends an update, or none.

    Client i counts d_is/p_{s|i} for model s. The signal determines p:

    - `norm`: optimal for the norms of the updates. Every client trains every model.
    - `loss`: the same with losses. Every client evaluates every model, and only selected clients train.
    - `round_robin`: all clients alike, each for one model after the other, so that each round trains every model.
    - `uniform`: all pairs of client and model alike.
    - `full`: every client sends every model, whatever the budget: the bound on what sampling can reach.

    Args:
        budget: m, the expected number of updates a round; more than 0, at most `per_round`.
        signal: one of the above.

    Source: Zhang et al. 2024, "Optimal Variance-Reduced Client Sampling for Multiple Models Federated Learning".
    """

    name = "mmfl"
    chooses_tasks = True

    def __init__(
        self,
        num_clients: int,
        per_round: int,
        seed: int,
        population: Population | None = None,
        *,
        budget: float | None = None,
        signal: str = "norm",
    ) -> None:
        super().__init__(num_clients, per_round, seed, population, budget=budget)
        if signal not in SIGNALS:
            raise UserError(f"clients.signal is {shown(signal)}; choose one of: {', '.join(SIGNALS)}")
        self.signal, self.needs_norms = signal, signal == "norm"

    def probabilities(self, round: int, signals: Matrix) -> Matrix:
        """Return p_{s|i}, (n, S), from the signals d_is·norm or d_is·loss of the cohort, (n, S).

        A client with a signal that is NaN, infinite or negative is left out and named in the log; the others are drawn
        with equal probabilities.
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
        """Draw, and return for each model the clients that send an update of it, with 1/p of each."""
        if self.signal == "full":
            return [dict.fromkeys(cohort, 1.0) for _ in range(probabilities.shape[1])]
        coins = upload_coins(self.seed, round, self.num_clients)[cohort]
        ends = np.cumsum(probabilities, axis=1)
        task = (coins[:, None] >= ends).sum(axis=1)  # as many as there are models: none
        return [
            {cohort[i]: 1.0 / float(probabilities[i, s]) for i in np.flatnonzero(task == s)}
            for s in range(probabilities.shape[1])
        ]
