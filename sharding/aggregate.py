"""Per-vector averaging: u'ᵢ ← Σ D_c u'ᵢ⁽ᶜ⁾ / Σ D_c over the clients c that hold term i; v' alike.

Each vector is averaged on its own, over those who drew it; a term that nobody drew keeps its value. Dense parameters
are averaged over all. Then W = Σ u'ᵢ v'ᵢᵀ; the multipliers do not enter. Updates are summed up as they arrive, in
float64, so that memory does not grow with the cohort. The order of the sum is that of arrival: an engine hands updates
over in an order that no worker's speed decides, and `aggregate` takes those of a mapping in the order of the plan.

Where clients were sampled with probabilities p_c, D_c/p_c takes the place of D_c (Horvitz-Thompson):

- Dense parameters x move by Σ_c (w_c/p_c) U_c, U_c = x_c − x and w_c = D_c/ΣD over all who might have been heard.
  That is unbiased for Σ_c w_c U_c (Chen, Horváth & Richtárik 2022, Eq. 3 and Algorithm 3; Luo et al. 2024 with
  p_c = K q_c/k_c for a client drawn k_c times).
- u'ᵢ and v'ᵢ become averages, with weights D_c/p_c, over those heard who hold them. Their numerators and
  denominators are unbiased for those of hearing everybody, their ratios up to the order of the variance (Hájek's
  estimator). A vector that nobody heard holds stays as it was.

With the server's rate η_g every weight of the model goes η_g of the way from its old value to this new one.

What a client sends is checked before it is summed up, and the new model before it takes the old one's place: what would
have a NaN or Inf is not kept. Two guards can be had against updates that are sound and yet wrong: a bound on their
norm, relative to the median of the round's, and the trimmed mean (`sharding.averages`). With either all updates are
kept until the last has come.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor, nn

from sharding.averages import Mean, RunningMean, TrimmedMean
from sharding.errors import UserError
from sharding.faults import NOTHING, find_fault, find_nonfinite
from sharding.numbers import is_number
from sharding.planner import Client, Plan
from sharding.shard import Shard, update_norm
from sharding.state import as_real, key
from sharding.wrappers import spread_like, unwrap, whole

log = logging.getLogger(__name__)

Returned = Mapping[Client, Shard | None] | Iterable[tuple[Client, Shard | None]]


@dataclass
class Aggregation:
    """Who was averaged in, and who was left out and why, both in the order of the plan."""

    accepted: list[Client] = field(default_factory=list)
    rejected: dict[Client, str] = field(default_factory=dict)


def aggregate(
    model: nn.Module,
    plan: Plan,
    updates: Returned,
    num_samples: Mapping[Client, float],
    total: float | None = None,
    server_lr: float = 1.0,
    norm_bound: float | None = None,
    trim: float = 0.0,
) -> Aggregation:
    """Average the clients' updates into the server's model, in place.

    Args:
        model: the dense model that `plan` was made from.
        plan: the round's shards as sent.
        updates: the shards as returned, a mapping or a stream of pairs; who is missing or None sent nothing.
        num_samples: D_c, the weight of each client, or D_c/p_c where clients were sampled; clients of the plan that are
            not in it are not heard, and their updates are not looked at.
        total: ΣD over all who might have been heard; see `Average.write_to`.
        server_lr: η_g, the share of the way from the old model to the aggregate.
        norm_bound: see `Average`.
        trim: see `Average`.

    Returns:
        Who was left out and why: nothing returned, not of this plan, other layers, types, shapes or indices, NaN or
        Inf, a weight that is none. If nobody is left, or the new model would have a NaN or Inf, the model stays as it
        was. What a client sends never raises.

    Raises:
        UserError: the caller's own numbers: total, server_lr, norm_bound or trim out of range; num_samples no mapping.
    """
    average = Average(plan, num_samples, norm_bound, trim)
    check_step(total, server_lr)
    for client, shard in _in_order(plan, updates):
        average.add(client, shard)
    return average.write_to(model, total, server_lr)


def _in_order(plan: Plan, updates: Returned) -> Iterable[tuple[Client, Shard | None]]:
    """Return the updates of a mapping in the order of the plan, those of clients that are not in it last."""
    if not isinstance(updates, Mapping):
        return updates
    return [
        (client, updates[client]) for client in (*plan, *(c for c in updates if c not in plan)) if client in updates
    ]


class Average:
    """The average of a round's updates, as far as they have arrived.

    Args:
        plan: the round's shards as sent.
        weights: D_c, or D_c/p_c, of those who are to be heard.
        norm_bound: leave out who changed its shard by more than this many times the (lower) median of the round; None
            for no bound.
        trim: β in [0, 1/2): the share of the values, at each end, that the trimmed mean leaves out of each coordinate
            of each vector, over those who hold it; 0 for the mean.

    Raises:
        UserError: a bound that is less than 1 or not finite, a trim outside [0, 1/2), weights that are no mapping.
    """

    def __init__(
        self, plan: Plan, weights: Mapping[Client, float], norm_bound: float | None = None, trim: float = 0.0
    ) -> None:
        if not isinstance(weights, Mapping):
            raise UserError(f"num_samples is a {type(weights).__name__}; a mapping is needed, client: its samples")
        if norm_bound is not None and not 1 <= norm_bound < inf:
            raise UserError(f"norm_bound is {norm_bound}; a finite number of at least 1 is needed, or None")
        if not 0 <= trim < 0.5:
            raise UserError(f"trim is {trim}; a number from 0 to less than 0.5 is needed, as 0.1")
        self._plan = plan
        self._heard = [client for client in plan if client in weights]
        self._weights = {client: float(weights[client]) for client in self._heard if _is_positive(weights[client])}
        self._faults: dict[Client, str | None] = {
            client: f"its weight is {weights[client]!r}, not a finite number above 0"
            for client in self._heard
            if client not in self._weights
        }
        self._mean: Mean = TrimmedMean(plan.spectra, trim) if trim else RunningMean(plan.spectra)
        self._bound = norm_bound
        self._held: dict[Client, Shard] = {}  # until their norms can be compared
        self._strange: dict[Client, str] = {}

    @torch.no_grad()
    def add(self, client: Client, shard: Shard | None) -> None:
        """Take a client's update in, if the client is to be heard and there is nothing wrong with it.

        A client's first word counts; what comes after it is left out and logged.
        """
        if client not in self._plan:
            self._strange[client] = "is not in this round's plan"
        if client not in self._weights:
            return
        if client in self._faults:
            log.warning("client %s sent another update in the same round; its first one counts", client)
            return
        self._faults[client] = find_fault(self._plan[client], shard)
        if self._faults[client] is not None or shard is None:
            return
        here = [tensor.device for tensor in self._plan[client].trained().values()]
        shard = shard.to(here[0]) if here else shard
        if self._bound is None:
            self._mean.add(self._plan.values_of(shard), self._weights[client])
        else:
            self._held[client] = shard

    @torch.no_grad()
    def write_to(self, model: nn.Module, total: float | None = None, server_lr: float = 1.0) -> Aggregation:
        """Give the server's model the averaged values, if there are any, and say who was averaged in.

        Args:
            model: the dense model that the plan was made from.
            total: ΣD over all who might have been heard, by which dense parameters' weights are divided; their own sum
                by default. If some of those to be heard sent nothing usable the others stand for them: the total
                shrinks in proportion to the weight that is lost.
            server_lr: η_g, the share of the way from the old model to the aggregate.

        Raises:
            UserError: total or server_lr is not a finite number above 0.
        """
        check_step(total, server_lr)
        self._compare_norms()
        state = unwrap(model).state_dict(keep_vars=True)
        moved = dict(self._moved(state, total, server_lr))
        faults = {client: self._faults.get(client, NOTHING) for client in self._heard}
        if (name := find_nonfinite(moved)) is not None:
            spoiled = f"with this round's updates {name} would have NaN or Inf; the model stays as it was"
            faults = {client: fault or spoiled for client, fault in faults.items()}
        else:
            for name, value in moved.items():
                weight = as_real(state[name])
                weight.copy_(spread_like(value, weight))
        rejected = {client: fault for client, fault in faults.items() if fault is not None}
        return Aggregation([client for client in faults if client not in rejected], rejected | self._strange)

    def _compare_norms(self) -> None:
        """Leave out the updates that are too long, and take the others in."""
        if self._bound is None or not self._held:
            return
        norms = torch.stack([update_norm(self._plan[client], shard) for client, shard in self._held.items()])
        median = float(norms.median())  # the lower one: of two clients, the one that changed less
        for (client, shard), norm in zip(self._held.items(), norms.tolist(), strict=True):
            if norm <= self._bound * median:
                self._mean.add(self._plan.values_of(shard), self._weights[client])
            else:
                self._faults[client] = (
                    f"its update's norm {norm:.3g} is above {self._bound:g} times the median {median:.3g}"
                )
        self._held.clear()

    def _moved(
        self, state: Mapping[str, Tensor], total: float | None, server_lr: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the new value of every tensor that moves, in its own type."""
        heard = self._mean.weight
        divisor = heard if total is None else total * heard / sum(self._weights.values() or [1.0])
        for name, weighted_sum in self._mean.dense():
            old = self._plan.dense[name]
            yield name, _part_of_the_way(as_real(state[name]), _step(weighted_sum, old, heard, divisor), server_lr)
        for layer, matrix in self._mean.matrices():
            weight = state[name := key(layer, "weight")]
            yield name, _part_of_the_way(weight, matrix.view(weight.shape), server_lr)


def check_step(total: float | None, server_lr: float) -> None:
    """Make sure that the server's own numbers are finite and above 0.

    Raises:
        UserError: one is not.
    """
    for name, value in (("total", total), ("server_lr", server_lr)):
        if value is not None and not _is_positive(value):
            raise UserError(f"{name} is {value!r}; a finite number above 0 is needed")


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def _step(weighted_sum: Tensor, sent: Tensor, weight: float, total: float) -> Tensor:
    """Return x + Σ weight_c·(x_c − x)/total, from Σ weight_c·x_c; the average where the weights sum to the total."""
    if weight != total:
        weighted_sum = weighted_sum.add(sent, alpha=total - weight)
    return weighted_sum / total


def _part_of_the_way(weight: Tensor, target: Tensor, server_lr: float) -> Tensor:
    """Return what lies η_g of the way to the target, in the weight's type."""
    if server_lr != 1.0:
        old = whole(weight)
        target = old + server_lr * (target - old)
    return target.to(weight.dtype)
