"""Per-vector averaging: u'ᵢ ← Σ D_c u'ᵢ⁽ᶜ⁾ / Σ D_c over the clients c that hold term i, and v'ᵢ in the same way.

Each vector is averaged over the clients that drew it, and over those that hold it frozen in a tail, which count with
the server's vectors: else a term would follow the few clients that train it. Then W would move by Δ = Σ (ū v̄ᵀ − u' v'ᵀ)
over the drawn terms, with the averages ū and v̄. A term that no client drew keeps its value, and the multipliers do not
enter. Dense parameters are averaged over all clients, and Δ is their average minus the parameter. Δ is what
`Server.step` gives to its optimizer as a negative gradient.

Updates are summed in float64 as they arrive, so that memory does not grow with the cohort. They are summed in the order
of arrival: an engine hands them over in an order that does not depend on the speed of its workers.

Where clients were sampled with probabilities p_c, D_c/p_c takes the place of D_c (Horvitz-Thompson):

- Dense parameters x move by Σ_c (w_c/p_c) U_c, U_c = x_c − x and w_c = D_c/ΣD over all clients that could have been
  selected. That is unbiased for Σ_c w_c U_c (Chen, Horváth & Richtárik 2022, Eq. 3 and Algorithm 3; Luo et al. 2024
  with p_c = K q_c/k_c for a client drawn k_c times).
- u'ᵢ and v'ᵢ become averages, with weights D_c/p_c, over the selected clients that hold them. Numerators and
  denominators are unbiased for those of full participation, the ratios up to the order of the variance (Hájek's
  estimator). A vector that no selected client holds stays as it was.

Where the server's layer is factorized, Δ is that of its factors (`sharding.matrices.product`). Added to them, it gives
the same Σ ū v̄ᵀ over all terms, of which those that nobody drew are as they were.

Each update is compared with what was sent before it is summed, and values with NaN or Inf are discarded. There are two
guards against updates that are finite but wrong: a bound on their norm, relative to the median of the round, and the
trimmed mean (`sharding.rounds.aggregation.means`). Either keeps all updates until the last has arrived. A bound on a
client's share of the weight keeps the few heaviest, since only theirs can have to be lowered.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor, inf

import torch
from torch import Tensor

from sharding.errors import UserError, safe_repr
from sharding.matrices.product import ProductSpectrum
from sharding.modules.finite import find_nonfinite
from sharding.modules.memory import release_freed_memory
from sharding.modules.wrappers import key
from sharding.rounds.aggregation.faults import NOTHING, find_misfit, find_spoiled
from sharding.rounds.aggregation.means import Mean, RunningMean, TrimmedMean, weight_change
from sharding.rounds.aggregation.shares import cap_shares
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.norms import statistics_norm, update_norm
from sharding.rounds.plan import Client, Plan
from sharding.rounds.shard import Update
from sharding.validation import is_number

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Aggregation:
    """The result of a round's average.

    Attributes:
        delta: the pseudo-gradient Δ = average − W of all that was averaged, by state-dict name, in the types and shapes
            of the plan; empty where no update counts.
        accepted: the clients that were averaged in, in the order of the plan.
        rejected: the clients that were left out, and the reason.
        nbytes: of every client's update on the wire.
    """

    delta: dict[str, Tensor]
    accepted: list[Client]
    rejected: dict[Client, Failure]
    nbytes: dict[Client, int]


class Average:
    """The average of a round's updates that have arrived so far.

    Args:
        plan: the round's shards as sent.
        weights: D_c, or D_c/p_c, of the clients that count; None where each update brings its weight.
        total: ΣD over all clients that could have been selected, which divides the weights of dense parameters; by
            default the sum of the weights. Where a selected client sent nothing usable, the others stand for it: the
            total shrinks in proportion to the weight that is lost, or that is above `max_share`.
        norm_bound: leave out updates whose norm is above this many times the (lower) median of the norms above 0, and
            updates of batch norms' running statistics likewise; None for no bound.
        trim: β in [0, 1/2): the share of the values, at each end, that the trimmed mean leaves out of each coordinate
            of each vector, over the clients that train it; 0 for the mean.
        max_share: the largest share of the weight of the updates that count that one client may have, in (0, 1]; 1 for
            no bound. Below 1, the ⌊1/max_share⌋ heaviest are kept until the last has arrived.

    Raises:
        UserError: norm_bound is below 1 or not finite, trim is outside [0, 1/2), max_share is outside (0, 1], total is
            not a finite number above 0, or weights is not a mapping.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[Client, float] | None,
        total: float | None = None,
        norm_bound: float | None = None,
        trim: float = 0.0,
        max_share: float = 1.0,
    ) -> None:
        self._weighs_late = weights is None
        weights = dict.fromkeys(plan, 0.0) if weights is None else weights
        if not isinstance(weights, Mapping):
            raise UserError(f"num_samples is a {type(weights).__name__}; pass a mapping from client to samples")
        if total is not None and not _is_positive(total):
            raise UserError(f"total is {total!r}; pass a finite number above 0")
        check_guards(norm_bound, trim, max_share)
        self._plan, self._total = plan, total
        self._selected = [client for client in plan if client in weights]
        self._weights = {client: float(weights[client]) for client in self._selected if _is_positive(weights[client])}
        self._claimed = sum(self._weights.values())
        if total is None and plan and not self._selected:  # where clients are sampled, there may be none
            warnings.warn("num_samples has no client of the plan, so no update counts", stacklevel=3)
        self._rejected = {
            client: Failure(Kind.FAILED, f"its weight is {weights[client]!r}, not a finite number above 0")
            for client in self._selected
            if client not in self._weights and not self._weighs_late
        }
        self._nbytes: dict[Client, int] = {}
        self._received: set[Client] = set()
        self._mean: Mean = TrimmedMean(plan.spectra, trim) if trim else RunningMean(plan.spectra)
        self._bound, self._max_share = norm_bound, max_share
        heaviest = 0 if max_share == 1 else floor(1 / max_share)  # more clients cannot have this share each
        self._num_pending = heaviest if norm_bound is None else inf
        self._pending: dict[Client, Update] = {}  # until their norms or weights can be compared

    @torch.no_grad()
    def add(self, client: Client, update: Update | Failure | None, weight: float | None = None) -> None:
        """Add a client's update, if the client counts and the update fits the plan and is finite.

        A client's first update counts; later ones are left out and logged. An update of a client without a weight is
        not used; a failure is noted in any case.

        Args:
            client: of the plan; others are noted and left out.
            update: what the client sent back, or the reason why there is none; None where nothing came back.
            weight: D_c, where the average was made without weights; else not read.
        """
        if client not in self._plan:
            log.warning("ignored an update from client %s, who is not in the round's plan", client)
            self._rejected[client] = Failure(Kind.OTHER_PLAN, "is not in this round's plan")
            return
        if client in self._received:
            log.warning("client %s sent another update in the same round; its first one counts", client)
            return
        self._received.add(client)
        if self._weighs_late and isinstance(update, Update):
            if is_number(weight) and weight > 0:
                self._weights[client] = float(weight)
                self._claimed += float(weight)
            else:
                update = Failure(Kind.MALFORMED, f"its weight is {safe_repr(weight)}, not a finite number above 0")
        failure = update if isinstance(update, Failure) else find_misfit(self._plan.template(client), update)
        if isinstance(update, Update) and failure is None:
            self._nbytes[client] = update.nbytes
            failure = find_spoiled(update) if client in self._weights else None
        if failure is not None:
            self._rejected.setdefault(client, failure)
            if self._weighs_late:
                self._weights.pop(client, None)  # else a node could lower the others' bound by an update that fails
        elif isinstance(update, Update) and client in self._weights:
            self._pending[client] = update.to(self._plan.device)
            if len(self._pending) > self._num_pending:
                lightest = min(self._pending, key=self._weights.__getitem__)  # of equal ones, the first to arrive
                self._count(lightest, self._pending.pop(lightest))

    @torch.no_grad()
    def finish(self) -> Aggregation:
        """Return the pseudo-gradient and the clients that were averaged in, and forget the sums."""
        if self._bound is not None:
            self._reject_long(self._bound)
        counting = {c: weight for c, weight in self._weights.items() if c in self._received and c not in self._rejected}
        self._weights |= cap_shares(counting, self._max_share)
        for client, update in self._pending.items():
            self._count(client, update)
        self._pending.clear()
        release_freed_memory()
        rejected = {client: NOTHING for client in self._selected if client not in self._received} | self._rejected
        delta = dict(self._changes())
        if (name := find_nonfinite(delta)) is not None:
            reason = f"with this round's updates {name} would have NaN or Inf; the model stays as it was"
            overflow = dict.fromkeys(self._selected, Failure(Kind.NOT_FINITE, reason))
            delta, rejected = {}, overflow | rejected
        accepted = [client for client in self._selected if client not in rejected]
        order = [client for client in (*self._plan, *rejected) if client in rejected]
        return Aggregation(delta, accepted, {client: rejected[client] for client in order}, self._nbytes)

    def _count(self, client: Client, update: Update) -> None:
        """Add the terms that a client held to the mean: new values of those that it trained, and its tail unchanged."""
        self._mean.add(self._plan.values_of(update), self._weights[client], self._plan.tail_indices(client))

    def _reject_long(self, bound: float) -> None:
        """Leave out the updates whose change, of what trains or of running statistics, is longer than the bound."""
        lengths = {}
        for client, update in self._pending.items():
            sent = self._plan.shard(client)
            lengths[client] = update_norm(sent, update), statistics_norm(sent, update)
        for column, whose in enumerate(("update", "running statistics")):
            kept = [lengths[client][column] for client in self._pending]
            norms = torch.stack(kept) if kept else torch.zeros(0)
            moved = norms[norms > 0]  # updates that changed nothing say nothing about the others
            median = float(moved.median()) if len(moved) else 0.0  # the lower one: of two, the one that changed less
            for client, norm in zip([*self._pending], norms.tolist(), strict=True):
                if norm > bound * median:
                    reason = f"the norm of its {whose}, {norm:.3g}, is above {bound:g} times the median {median:.3g}"
                    self._rejected[client] = Failure(Kind.TOO_LONG, reason)
                    del self._pending[client]

    def _changes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and Δ of every tensor that was averaged, in its type."""
        weight = self._mean.weight
        total = weight if self._total is None else self._total * weight / (self._claimed or 1.0)
        for name, weighted_sum in self._mean.dense():
            sent = self._plan.dense[name]
            yield name, (weighted_sum.sub_(sent.double(), alpha=weight) / total).to(sent.dtype)
        for layer, u, v in self._mean.vectors():
            release_freed_memory()
            spectrum = self._plan.spectra[layer]
            if isinstance(spectrum, ProductSpectrum):
                yield from zip((key(layer, "u"), key(layer, "v")), spectrum.factor_changes(u, v), strict=True)
            else:
                yield key(layer, "weight"), weight_change(spectrum, u, v).view(self._plan.shapes[layer])


def check_guards(norm_bound: float | None, trim: float, max_share: float) -> None:
    """Check the guards of an `Average`.

    Raises:
        UserError: one of them is out of its range.
    """
    if norm_bound is not None and not (is_number(norm_bound) and norm_bound >= 1):
        raise UserError(f"norm_bound is {safe_repr(norm_bound)}; pass a finite number of at least 1, or None")
    if not (is_number(trim) and 0 <= trim < 0.5):
        raise UserError(f"trim is {safe_repr(trim)}; pass a number from 0 to less than 0.5, such as 0.1")
    if not (is_number(max_share) and 0 < max_share <= 1):
        raise UserError(f"max_share is {safe_repr(max_share)}; pass a number above 0 and at most 1, such as 0.5")


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0
