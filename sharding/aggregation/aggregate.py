"""Per-vector averaging: u'ᵢ ← Σ D_c u'ᵢ⁽ᶜ⁾ / Σ D_c over the clients c that hold term i, and v'ᵢ in the same way.

Each vector is averaged over the clients that drew it. Then W moves by Σ (ū v̄ᵀ − u' v'ᵀ) over the drawn terms, with the
averages ū and v̄. A term that no client drew keeps its value, and the multipliers do not enter. Dense parameters are
averaged over all clients. Updates are summed in float64 as they arrive, so that memory does not grow with the cohort.
They are summed in the order of arrival: an engine hands them over in an order that does not depend on the speed of its
workers, and a mapping is taken in the order of the plan.

Where clients were sampled with probabilities p_c, D_c/p_c takes the place of D_c (Horvitz-Thompson):

- Dense parameters x move by Σ_c (w_c/p_c) U_c, U_c = x_c − x and w_c = D_c/ΣD over all clients that could have been
  selected. That is unbiased for Σ_c w_c U_c (Chen, Horváth & Richtárik 2022, Eq. 3 and Algorithm 3; Luo et al. 2024
  with p_c = K q_c/k_c for a client drawn k_c times).
- u'ᵢ and v'ᵢ become averages, with weights D_c/p_c, over the selected clients that hold them. Numerators and
  denominators are unbiased for those of full participation, the ratios up to the order of the variance (Hájek's
  estimator). A vector that no selected client holds stays as it was.

With the server's rate η_g every weight of the model moves η_g of the way from its old value to this new one.

Each update is checked before it is summed, and the new model before it replaces the old one: values with NaN or Inf are
discarded. There are two guards against updates that are finite but wrong: a bound on their norm, relative to the median
of the round, and the trimmed mean (`sharding.aggregation.means`). Either keeps all updates until the last has arrived.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor, nn

from sharding.aggregation.faults import NOTHING, find_misfit, find_spoiled
from sharding.aggregation.means import Mean, RunningMean, TrimmedMean, moved_weight
from sharding.aggregation.shares import cap_shares
from sharding.errors import UserError, few
from sharding.failures import Failure, Kind
from sharding.modules.finite import find_nonfinite
from sharding.modules.state import as_real, is_variance
from sharding.modules.wrappers import distribute_like, full_tensor, key, named_state
from sharding.planner import Client, Plan
from sharding.shard import Shard, update_norm
from sharding.validation import is_number

log = logging.getLogger(__name__)

Returned = Mapping[Client, Shard | None] | Iterable[tuple[Client, Shard | None]]


@dataclass
class Aggregation:
    """The clients that were averaged in, and those that were left out and why, in the order of the plan."""

    accepted: list[Client] = field(default_factory=list)
    rejected: dict[Client, Failure] = field(default_factory=dict)


class Average:
    """The average of a round's updates that have arrived so far.

    Args:
        plan: the round's shards as sent.
        weights: D_c, or D_c/p_c, of the clients that count.
        norm_bound: leave out updates whose norm is above this many times the (lower) median of the norms above 0; None
            for no bound.
        trim: β in [0, 1/2): the share of the values, at each end, that the trimmed mean leaves out of each coordinate
            of each vector, over the clients that hold it; 0 for the mean.
        max_share: the largest share of the sum of the weights that one client may have, in (0, 1]; 1 for no bound.

    Raises:
        UserError: norm_bound is below 1 or not finite, trim is outside [0, 1/2), max_share is outside (0, 1], or
            weights is not a mapping.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[Client, float],
        norm_bound: float | None = None,
        trim: float = 0.0,
        max_share: float = 1.0,
    ) -> None:
        if not isinstance(weights, Mapping):
            raise UserError(f"num_samples is a {type(weights).__name__}; pass a mapping from client to samples")
        if norm_bound is not None and not 1 <= norm_bound < inf:
            raise UserError(f"norm_bound is {norm_bound}; pass a finite number of at least 1, or None")
        if not 0 <= trim < 0.5:
            raise UserError(f"trim is {trim}; pass a number from 0 to less than 0.5, such as 0.1")
        if not 0 < max_share <= 1:
            raise UserError(f"max_share is {max_share}; pass a number above 0 and at most 1, such as 0.5")
        self._plan = plan
        self._heard = [client for client in plan if client in weights]
        claimed = {client: float(weights[client]) for client in self._heard if _is_positive(weights[client])}
        self._claimed, self._weights = sum(claimed.values()), cap_shares(claimed, max_share)
        self._faults: dict[Client, Failure | None] = {
            client: Failure(Kind.FAILED, f"its weight is {weights[client]!r}, not a finite number above 0")
            for client in self._heard
            if client not in self._weights
        }
        self._mean: Mean = TrimmedMean(plan.spectra, trim) if trim else RunningMean(plan.spectra)
        self._bound = norm_bound
        self._held: dict[Client, Shard] = {}  # until their norms can be compared
        self._strange: dict[Client, Failure] = {}

    @torch.no_grad()
    def add(self, client: Client, update: Shard | Failure | None) -> None:
        """Add a client's update, if the client counts and the values are finite.

        A client's first update counts; later ones are left out and logged.

        Args:
            client: of the plan; others are noted and left out.
            update: a shard that fits the plan (`sharding.aggregation.faults.find_misfit`), or why there is none.
        """
        if client not in self._plan:
            self._strange[client] = Failure(Kind.OTHER_PLAN, "is not in this round's plan")
        if client not in self._weights:
            return
        if client in self._faults:
            log.warning("client %s sent another update in the same round; its first one counts", client)
            return
        if not isinstance(update, Shard):
            self._faults[client] = update or NOTHING
            return
        self._faults[client] = find_spoiled(update)
        if self._faults[client] is not None:
            return
        shard = update.to(self._plan.device)
        if self._bound is None:
            self._mean.add(self._plan.values_of(shard), self._weights[client])
        else:
            self._held[client] = shard

    def add_all(self, updates: Returned) -> None:
        """Add the updates as they arrive; those that do not fit the plan are left out.

        Args:
            updates: a mapping, taken in the order of the plan, or a stream of pairs; None where a client failed.
        """
        if isinstance(updates, Mapping):
            order = [*self._plan, *(client for client in updates if client not in self._plan)]
            updates = [(client, updates[client]) for client in order if client in updates]
        for client, shard in updates:
            misfit = find_misfit(self._plan[client], shard) if client in self._plan else None
            self.add(client, shard if misfit is None else misfit)

    @torch.no_grad()
    def write_to(self, model: nn.Module, total: float | None = None, server_lr: float = 1.0) -> Aggregation:
        """Write the averaged values to the server's model, and return which clients were averaged in.

        Args:
            model: the dense model that the plan was made from.
            total: ΣD over all clients that could have been selected, which divides the weights of dense parameters; by
                default the sum of the weights. Where a selected client sent nothing usable, the others stand for it:
                the total shrinks in proportion to the weight that is lost, or that is above `max_share`.
            server_lr: η_g, the share of the way from the old model to the aggregate.

        Raises:
            UserError: total or server_lr is not a finite number above 0; the plan was made from another model.
        """
        for what, number in (("total", total), ("server_lr", server_lr)):
            if number is not None and not _is_positive(number):
                raise UserError(f"{what} is {number!r}; pass a finite number above 0")
        if total is None and self._plan and not self._heard:  # where clients are sampled, there may be none
            warnings.warn("num_samples has no client of the plan, so no update counts", stacklevel=5)
        self._compare_norms()
        state = named_state(model)
        _check_names(state, self._plan)
        values = {name: _possible(name, value) for name, value in self._moved(state, total, server_lr)}
        faults = {client: self._faults.get(client, NOTHING) for client in self._heard}
        if (name := find_nonfinite(values)) is not None:
            why = f"with this round's updates {name} would have NaN or Inf; the model stays as it was"
            spoiled = Failure(Kind.NOT_FINITE, why)
            faults = {client: fault or spoiled for client, fault in faults.items()}
        else:
            for name, value in values.items():
                weight = as_real(state[name])
                weight.copy_(distribute_like(value, weight))
        rejected = {client: fault for client, fault in faults.items() if fault is not None}
        return Aggregation([client for client in faults if client not in rejected], rejected | self._strange)

    def _compare_norms(self) -> None:
        """Add the updates that are within the bound on norms, and leave the others out."""
        if self._bound is None or not self._held:
            return
        norms = torch.stack([update_norm(self._plan[client], shard) for client, shard in self._held.items()])
        moved = norms[norms > 0]  # updates that changed nothing say nothing about the others
        median = float(moved.median()) if len(moved) else 0.0  # the lower one: of two, the one that changed less
        for (client, shard), norm in zip(self._held.items(), norms.tolist(), strict=True):
            if norm <= self._bound * median:
                self._mean.add(self._plan.values_of(shard), self._weights[client])
            else:
                why = f"its update's norm {norm:.3g} is above {self._bound:g} times the median {median:.3g}"
                self._faults[client] = Failure(Kind.TOO_LONG, why)
        self._held.clear()

    def _moved(
        self, state: Mapping[str, Tensor], total: float | None, server_lr: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the new value of every tensor that moves, in the tensor's type."""
        heard = self._mean.weight
        divisor = heard if total is None else total * heard / (self._claimed or 1.0)
        for name, weighted_sum in self._mean.dense():
            old = self._plan.dense[name]
            yield name, _part_of_the_way(as_real(state[name]), _step(weighted_sum, old, heard, divisor), server_lr)
        for layer, u, v in self._mean.vectors():
            weight = full_tensor(state[name := key(layer, "weight")])
            yield name, moved_weight(weight, self._plan.spectra[layer], u, v, server_lr)


def _check_names(state: Mapping[str, Tensor], plan: Plan) -> None:
    """Make sure that a model has what a plan has, in the same shapes.

    Raises:
        UserError: the plan was made from another model.
    """
    planned = {*plan.dense, *(key(layer, "weight") for layer in plan.spectra)}
    if missing := sorted(planned - state.keys()):
        raise UserError(f"the model has no {few(missing)}; aggregate into the model that the plan was made from")
    if other := [name for name, its in plan.dense.items() if as_real(state[name]).shape != its.shape]:
        raise UserError(f"the model has {few(other)} in other shapes; aggregate into the model of the plan")


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def _step(weighted_sum: Tensor, sent: Tensor, weight: float, total: float) -> Tensor:
    """Return x + Σ weight_c·(x_c − x)/total, from Σ weight_c·x_c; the average where the weights sum to the total."""
    if weight != total:
        weighted_sum = weighted_sum.add(sent.double(), alpha=total - weight)
    return weighted_sum / total


def _possible(name: str, value: Tensor) -> Tensor:
    """Return a valid value: a step beyond the average, or rounding, can make a variance negative."""
    return value.clamp(min=0) if is_variance(name) else value


def _part_of_the_way(weight: Tensor, target: Tensor, server_lr: float) -> Tensor:
    """Return the point η_g of the way from the weight to the target, in the weight's type."""
    if server_lr != 1.0:
        old = full_tensor(weight).double()
        target = old + server_lr * (target - old)
    return target.to(weight.dtype)
