"""Sampling for several models (MMFL): in a round each client sends an update of at most one model, but for `full`.

Client i works for model s with probability p_{s|i}, and Σ_s p_{s|i} ≤ 1. The best split of a client's total p_i is in
proportion to its norms; its share of the variance is then (Σ_s a_is)²/p_i. The optimal p_i are therefore those of one
model with norms M_i = Σ_s a_is.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.client_sampling.sampler import BudgetSampler, upload_coins
from sharding.errors import UserError, safe_repr
from sharding.terms.inclusion import optimal_inclusion
from sharding.validation import as_floats, is_number

Matrix = NDArray[np.float64]
Signal = Literal["norm", "loss", "round_robin", "uniform", "full"]


@dataclass(eq=False, repr=False)
class TaskSampler(BudgetSampler):
    """Draws for each client independently the model of which it sends an update, or none.

    Client i counts d_is/p_{s|i} for model s. The signal determines p:

    - `norm`: optimal for the norms of the updates. Every client trains every model.
    - `loss`: the same with losses. Every client evaluates every model, and only selected clients train.
    - `round_robin`: all clients alike, each for one model after the other, so that each round trains every model.
      Only the clients whose turn it is, one in S, can be drawn for a model, with p = m/N, but they count over the data
      of all. So a model's expected step is 1/S of that of the other signals: choose its step size for itself.
    - `uniform`: all pairs of client and model alike.
    - `full`: every client sends every model, whatever the budget: the bound on what sampling can reach.

    Attributes:
        budget: m, the expected number of updates a round; more than 0, at most `per_round`; `full` needs none.
        signal: one of the above.

    Source: Zhang et al. 2024, "Optimal Variance-Reduced Client Sampling for Multiple Models Federated Learning".
    """

    name = "mmfl"

    budget: float = field(default=None, kw_only=True)  # type: ignore[assignment]  # which `full` does not need
    signal: Signal = field(default="norm", kw_only=True)

    def __post_init__(self) -> None:
        if self.signal not in get_args(Signal):
            raise UserError(f"signal is {safe_repr(self.signal)}; choose one of: {', '.join(get_args(Signal))}")
        if self.signal == "full" and not is_number(self.budget):
            self.budget = self.per_round
        super().__post_init__()
        self.needs_norms = self.signal == "norm"

    def probabilities(self, round: int, signals: Matrix) -> Matrix:
        """Return p_{s|i}, (n, S), from the signals d_is·norm or d_is·loss of the cohort, (n, S).

        Raises:
            UserError: a norm or a loss is negative or not finite; give a client without one 0.
        """
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


def mmfl_probabilities(norms: ArrayLike, budget: float) -> Matrix:
    """Minimize Σ a²/p subject to Σ_s p_is ≤ 1 for every client and Σ p = budget.

    A client whose norms are all zero splits its probability evenly.

    Args:
        norms: (N, S) a_is = ‖d_is U_is‖, where d_is is client i's share of model s's data; or d_is times its loss.
        budget: m, the expected number of uploads over all models, in (0, N].

    Returns:
        (N, S) p_{s|i}, rows summing to at most 1.

    Raises:
        UserError: norms is not a matrix, or has negative or non-finite entries; or the budget is out of range.

    Source: Zhang et al. 2024, "Optimal Variance-Reduced Client Sampling for Multiple Models Federated Learning".
    """
    a = np.asarray(as_floats(norms, "norms"))
    if a.ndim != 2 or a.shape[1] == 0:
        raise UserError(f"norms has shape {a.shape}; one row per client and one column per model are needed")
    scaled = a / (a.max(initial=0.0) or 1.0)
    totals = scaled.sum(axis=1)
    share = np.divide(scaled, totals[:, None], out=np.full(a.shape, 1.0 / a.shape[1]), where=totals[:, None] > 0)
    return optimal_inclusion(totals, budget)[:, None] * share
