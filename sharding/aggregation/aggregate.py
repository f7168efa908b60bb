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
norm, relative to the median of the round's, and the trimmed mean (`sharding.aggregation.means`). With either all
updates are kept until the last has come.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor, nn

from sharding.aggregation.faults import NOTHING, find_misfit, find_spoiled
from sharding.aggregation.means import Mean, RunningMean, TrimmedMean
from sharding.aggregation.shares import cap_shares
from sharding.errors import Failure, Kind, UserError, few
from sharding.modules.finite import find_nonfinite
from sharding.modules.state import as_real, is_variance, key
from sharding.modules.wrappers import spread_like, unwrap, whole
from sharding.planner import Client, Plan
from sharding.shard import Shard, update_norm
from sharding.validation import is_number

log = logging.getLogger(__name__)

Returned = Mapping[Client, Shard | None] | Iterable[tuple[Client, Shard | None]]


@dataclass
class Aggregation:
    """Who was averaged in, and who was left out and why, both in the order of the plan."""

    accepted: list[Client] = field(default_factory=list)
    rejected: dict[Client, Failure] = field(default_factory=dict)


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
    average.add_all(updates)
    return average.write_to(model, total, server_lr)


class Average:
    """The average of a round's updates, as far as they have arrived.

    Args:
        plan: the round's shards as sent.
        weights: D_c, or D_c/p_c, of those who are to be heard.
        norm_bound: leave out who changed its shard by more than this many times the (lower) median of those who changed
            theirs; None for no bound.
        trim: β in [0, 1/2): the share of the values, at each end, that the trimmed mean leaves out of each coordinate
            of each vector, over those who hold it; 0 for the mean.
        max_share: the most that one client may have of the sum of the weights, in (0, 1]; 1 for no bound.

    Raises:
        UserError: a bound that is less than 1 or not finite, a trim outside [0, 1/2), a share outside (0, 1], weights
            that are no mapping.
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
            raise UserError(f"num_samples is a {type(weights).__name__}; a mapping is needed, client: its samples")
        if norm_bound is not None and not 1 <= norm_bound < inf:
            raise UserError(f"norm_bound is {norm_bound}; a finite number of at least 1 is needed, or None")
        if not 0 <= trim < 0.5:
            raise UserError(f"trim is {trim}; a number from 0 to less than 0.5 is needed, as 0.1")
        if not 0 < max_share <= 1:
            raise UserError(f"max_share is {max_share}; a number above 0 and at most 1 is needed, as 0.5")
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
        """Take a client's update in, if the client is to be heard and its values are sound.

        A client's first word counts; what comes after it is left out and logged.

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
        here = [tensor.device for tensor in self._plan[client].trained().values()]
        shard = update.to(here[0]) if here else update
        if self._bound is None:
            self._mean.add(self._plan.values_of(shard), self._weights[client])
        else:
            self._held[client] = shard

    def add_all(self, updates: Returned) -> None:
        """Take in what clients returned, as it comes; what does not fit the plan is left out.

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
        """Give the server's model the averaged values, if there are any, and say who was averaged in.

        Args:
            model: the dense model that the plan was made from.
            total: ΣD over all who might have been heard, by which dense parameters' weights are divided; their own sum
                by default. If some of those to be heard sent nothing usable the others stand for them: the total
                shrinks in proportion to the weight that is lost, or that is above `max_share`.
            server_lr: η_g, the share of the way from the old model to the aggregate.

        Raises:
            UserError: total or server_lr is not a finite number above 0; the plan was made from another model.
        """
        check_step(total, server_lr)
        if total is None and not self._heard:  # where clients are sampled, it can be that none is
            warnings.warn("num_samples has no client of the plan, so no update counts", stacklevel=4)
        self._compare_norms()
        state = unwrap(model).state_dict(keep_vars=True)
        _check_names(state, self._plan)
        moved = {name: _possible(name, value) for name, value in self._moved(state, total, server_lr)}
        faults = {client: self._faults.get(client, NOTHING) for client in self._heard}
        if (name := find_nonfinite(moved)) is not None:
            why = f"with this round's updates {name} would have NaN or Inf; the model stays as it was"
            spoiled = Failure(Kind.NOT_FINITE, why)
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
        moved = norms[norms > 0]  # who changed nothing is no measure of those who trained
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
        """Yield the new value of every tensor that moves, in its own type."""
        heard = self._mean.weight
        divisor = heard if total is None else total * heard / (self._claimed or 1.0)
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


def _check_names(state: Mapping[str, Tensor], plan: Plan) -> None:
    """Make sure that a model has what a plan has.

    Raises:
        UserError: the plan was made from another model.
    """
    planned = {*plan.dense, *(key(layer, "weight") for layer in plan.spectra)}
    if missing := sorted(planned - state.keys()):
        raise UserError(f"the model has no {few(missing)}; aggregate into the model that the plan was made from")


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def _step(weighted_sum: Tensor, sent: Tensor, weight: float, total: float) -> Tensor:
    """Return x + Σ weight_c·(x_c − x)/total, from Σ weight_c·x_c; the average where the weights sum to the total."""
    if weight != total:
        weighted_sum = weighted_sum.add(sent.double(), alpha=total - weight)
    return weighted_sum / total


def _possible(name: str, value: Tensor) -> Tensor:
    """Return a value that its tensor can have: steps beyond the average, and rounding, can make a variance negative."""
    return value.clamp(min=0) if is_variance(name) else value


def _part_of_the_way(weight: Tensor, target: Tensor, server_lr: float) -> Tensor:
    """Return what lies η_g of the way to the target, in the weight's type."""
    if server_lr != 1.0:
        old = whole(weight).double()
        target = old + server_lr * (target - old)
    return target.to(weight.dtype)
