"""Two-stage sampling: many clients train and report the norm of their update, few upload it.

Client c reports u_c = ‖w_c U_c‖, where w_c = D_c/ΣD over the clients that report. It uploads with a probability p_c
that depends on all norms, independently of the others, and counts w_c/p_c. Among all such schemes with the same
expected number of uploads the optimal p add the least variance.

In sharded layers U_c is the change of the vectors u' and v' that the client holds, elsewhere that of the parameters.
"""

import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from sharding.client_sampling.aocs import aocs_probabilities, plain_sum
from sharding.client_sampling.sampler import BudgetSampler, Participation, upload_coins
from sharding.errors import safe_repr
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.plan import Client
from sharding.terms.inclusion import optimal_inclusion
from sharding.validation import Vector

log = logging.getLogger(__name__)

REPORT_BYTES = 4  # a norm or a summand travels as one float32


def reject(reports: Mapping[Client, float], round: int, kind: str = "norm") -> dict[Client, Failure]:
    """Log the clients whose report, a norm or a loss, is NaN, infinite or negative, and return the failure of each."""
    rejected = {
        client: Failure(Kind.NOT_FINITE, f"reported a {kind} of {value}")
        for client, value in reports.items()
        if not 0 <= value < np.inf
    }
    if rejected:
        log.warning("clients %s: no %s in round %d", safe_repr(list(rejected)), kind, round)
    return rejected


class OptimalSampler(BudgetSampler):
    """Optimal client sampling (OCS): the server sees every norm and computes p.

    A client whose norm is NaN, infinite or negative is left out of the round and named in the log. Since its part of
    the total is unknown, the other clients then upload with equal probabilities.

    FedAvg with server rate η_g is Algorithm 3 of the paper. DSGD is the case of one local step without momentum
    (one epoch of one batch), U_c = −η·gradient.

    Source: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723), Algorithm 1 and Eq. 7.
    """

    name = "ocs"
    needs_norms = True

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Draw the clients that upload, by the norms that were reported."""
        rejected = reject(norms, round)
        clients = np.array([client for client in norms if client not in rejected], dtype=np.int64)
        sizes = self.population.num_samples[clients]
        if not sizes.any():  # no client reported, or none of them has data
            return Participation({}, 1.0, rejected)
        scaled = sizes / sizes.sum() * np.array([norms[client] for client in clients])
        known = np.zeros(clients.size) if rejected else scaled  # where all norms are zero, p is uniform
        p, report_bytes = self.probabilities(known, self.population.costs[clients])
        if rejected:
            report_bytes = REPORT_BYTES * len(norms)
        alpha, gamma = improvement_factors(scaled, p, float(p.sum()))
        coins = upload_coins(self.seed, round, self.num_clients)[clients]
        weights: dict[Client, float] = {int(clients[i]): float(sizes[i] / p[i]) for i in np.flatnonzero(coins < p)}
        metrics = {"improvement_alpha": alpha, "improvement_gamma": gamma}
        return Participation(weights, float(sizes.sum()), rejected, metrics, report_bytes)

    def probabilities(self, norms: Vector, costs: Vector) -> tuple[Vector, int]:
        """Return p, (n,), and the bytes that all clients reported, from their norms and costs, (n,) each."""
        return optimal_inclusion(norms, min(self.budget, norms.size)), REPORT_BYTES * norms.size


class SecureOptimalSampler(OptimalSampler):
    """AOCS: nearly the same probabilities, computed only from totals, so that norms can be aggregated securely.

    One sum more than published, a float a client, counts the norms that are not finite.

    Source: Chen, Horváth & Richtárik, TMLR 2022, Algorithm 2 with j_max = 4.
    """

    name = "aocs"

    def probabilities(self, norms: Vector, costs: Vector) -> tuple[Vector, int]:
        """Return p and the bytes of all sums."""
        sums = 0

        def counted(values: Vector) -> float:
            nonlocal sums
            sums += 1
            return plain_sum(values)

        p = aocs_probabilities(norms, min(self.budget, norms.size), counted)
        return p, REPORT_BYTES * norms.size * sums


class PartialOptimalSampler(OptimalSampler):
    """OCS for clients that each train a part of the model: the budget is Σ r_c p_c = m, in whole models.

    r_c is the cost of an update of c: the bytes of its shard over the bytes of the dense model.

    Clients are ordered by u/√r, which follows from the KKT conditions; the note's rule, √r·u, contradicts them. If the
    budget exceeds Σ r_c of the cohort, all upload. In the note all clients report; here the invited clients do.

    Source: Dabaja & El-Azouzi, optimal client sampling with partial training.
    """

    name = "ocs_partial"

    def probabilities(self, norms: Vector, costs: Vector) -> tuple[Vector, int]:
        """Return p, (n,), and the bytes of one norm per client; the server knows the costs."""
        budget = min(self.budget, float(costs.sum()))
        return optimal_inclusion(norms, budget, costs), REPORT_BYTES * norms.size


def improvement_factors(norms: ArrayLike, probabilities: ArrayLike, budget: float) -> tuple[float, float]:
    """Return (α, γ) of one round: how close it comes to full participation.

    α = Σ u²(1/p − 1) / (n/m − 1)Σ u² is the variance of the draws relative to uniform draws of the same expected
    number: 0 is as good as full participation, 1 is no better than uniform. γ = m/(α(n − m) + m) is the share of full
    participation's step size that the convergence theory allows: m/n for uniform, 1 for full.

    Args:
        norms: (n,) u = ‖w U‖.
        probabilities: (n,) p; where p = 0, u must be 0.
        budget: m; with costs, Σp, the expected number of uploads.

    Source: Chen, Horváth & Richtárik, TMLR 2022 (arXiv 2010.13723), Eqs. 15 and 16.
    """
    u, p = np.asarray(norms, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    squares = u**2
    variance = squares * np.divide(1.0 - p, p, out=np.zeros_like(p), where=p > 0)
    uniform = (u.size / budget - 1.0) * float(squares.sum())
    alpha = float(variance.sum()) / uniform if uniform > 0.0 else 0.0
    return alpha, budget / (alpha * (u.size - budget) + budget)
