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

Each update is compared with what was sent before it is summed, and values with NaN or Inf are discarded.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TypeGuard

import torch
from torch import Tensor

from sharding.errors import safe_repr
from sharding.matrices.spectrum import Spectrum
from sharding.matrices.values import find_nonfinite
from sharding.modules.memory import release_freed_memory
from sharding.modules.wrappers import key
from sharding.rounds.aggregation.faults import NOTHING, find_misfit, find_spoiled
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.plan import Client, Plan
from sharding.rounds.shard import Update
from sharding.validation import is_number

log = logging.getLogger(__name__)

PIECE = 2**15  # numbers


@dataclass(frozen=True)
class Outcome:
    """What became of a round's updates.

    Attributes:
        accepted: the clients that were averaged in, in the order of the plan.
        rejected: the clients that were left out, and the reason.
        received: the clients whose update fits the plan, counted or not, in the order of arrival.
        release: with privacy, the name of the released sums and noise. Where a round is run again, another name
            is another release, which counts as one more round in `sharding.Gaussian.epsilon`. Empty without privacy.
    """

    accepted: list[Client]
    rejected: dict[Client, Failure]
    received: list[Client]
    release: str = ""


class Average:
    """The average of a round's updates that have arrived so far.

    Args:
        plan: the round's shards as sent.
        weights: D_c, or D_c/p_c, of the clients that count; None where each update brings its weight.
        total: ΣD over all clients that could have been selected, which divides the weights of dense parameters; by
            default the sum of the weights. Where a selected client sent nothing usable, the others stand for it: the
            total shrinks in proportion to the weight that is lost.
    """

    def __init__(self, plan: Plan, weights: Mapping[Client, float] | None, total: float | None = None) -> None:
        self._plan, self._total, self._weighs_late = plan, total, weights is None
        weights = {} if weights is None else weights
        self._selected = [client for client in plan if self._weighs_late or client in weights]
        self._weights = {client: float(w) for client in plan if _is_positive(w := weights.get(client))}
        self._claimed = sum(self._weights.values())
        self._rejected = {
            client: Failure(Kind.FAILED, _no_weight(weights[client]))
            for client in plan
            if client in weights and client not in self._weights
        }
        self._fitting: list[Client] = []
        self._received: set[Client] = set()
        self._weight = 0.0  # of all updates so far
        self._whole: dict[str, Tensor] = {}  # weighted sums, float64
        self._layers: dict[str, _Sums] = {}
        self._lock = Lock()

    @torch.no_grad()
    def add(self, client: Client, update: Update | Failure | None, weight: float | None = None) -> None:
        """Add a client's update, if the client counts and the update fits the plan and is finite.

        A client's first update counts; later ones are left out and logged. An update of a client without a weight is
        not used; a failure is noted in any case. Threads may call this at the same time, one for each request of a
        server, say; then the order of arrival, and with it the last bits of the sum, is theirs.

        Args:
            client: a client of the plan; others are noted and left out.
            update: the update that the client sent back, or the reason why there is none; None where nothing came back.
            weight: D_c, where the average was made without weights; else not read.
        """
        with self._lock:
            if client not in self._plan:
                log.warning("ignored an update from client %s, who is not in the round's plan", client)
                self._rejected[client] = Failure(Kind.OTHER_PLAN, "is not in this round's plan")
                return
            if client in self._received:
                log.warning("client %s sent another update in the same round; its first one counts", client)
                return
            self._received.add(client)
            if self._weighs_late and isinstance(update, Update):
                if _is_positive(weight):
                    self._weights[client] = float(weight)
                else:
                    update = Failure(Kind.MALFORMED, _no_weight(weight))
            failure = update if isinstance(update, Failure) else find_misfit(self._plan.template(client), update)
            if isinstance(update, Update) and failure is None:
                self._fitting.append(client)
                failure = find_spoiled(update) if client in self._weights else None
            if failure is not None:
                self._rejected.setdefault(client, failure)
            elif isinstance(update, Update) and client in self._weights:
                self._count(client, update.to(self._plan.device))

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, Tensor], Outcome]:
        """Return the pseudo-gradient and what became of the updates, and forget the sums.

        Returns:
            Δ = average − W of all that was averaged, by state-dict name, in the types and shapes of the plan; empty
            where no update counts.
        """
        release_freed_memory()
        rejected = {client: NOTHING for client in self._selected if client not in self._received} | self._rejected
        delta = dict(self._changes())
        if (name := find_nonfinite(delta)) is not None:
            reason = f"with this round's updates {name} would have NaN or Inf; the model stays as it was"
            overflow = dict.fromkeys(self._selected, Failure(Kind.NOT_FINITE, reason))
            delta, rejected = {}, overflow | rejected
        accepted = [client for client in self._selected if client not in rejected]
        order = [client for client in (*self._plan, *rejected) if client in rejected]
        return delta, Outcome(accepted, {client: rejected[client] for client in order}, self._fitting)

    def _count(self, client: Client, update: Update) -> None:
        """Add a client's update to the sums: new values of the terms that it trained, and its tail unchanged."""
        values, weight, in_tail = self._plan.values_of(update), self._weights[client], self._plan.tail_indices(client)
        self._weight += weight
        for name, tensor in values.whole.items():
            if name in self._whole:
                _add(self._whole[name], tensor, weight)
            else:
                self._whole[name] = tensor.double().contiguous() * weight
        for name, terms in values.terms.items():
            if name not in self._layers:
                self._layers[name] = _Sums(self._plan.spectra[name])
            self._layers[name].add(terms.indices, terms.u, terms.v, weight)
            if name in in_tail:
                self._layers[name].hold(in_tail[name], weight)

    def _changes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and Δ of every tensor that was averaged, in its type, and forget its sums."""
        weight = self._weight
        total = weight if self._total is None else self._total * weight / (self._claimed or 1.0)
        for name, sent in self._plan.whole.items():
            if name in self._whole:
                yield name, (self._whole.pop(name).sub_(sent.double(), alpha=weight) / total).to(sent.dtype)
        for layer in list(self._layers):
            release_freed_memory()
            yield from self._layer_changes(layer, *self._layers.pop(layer).means())

    def _layer_changes(self, layer: str, u: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and Δ of each weight of a sharded layer whose terms move to ū and v̄, float64."""
        for name, change in self._plan.spectra[layer].changes(u, v).items():
            yield key(layer, name), change.view(self._plan.shapes[key(layer, name)])


def _add(total: Tensor, part: Tensor, weight: float) -> None:
    """Add weight·part to a total in float64; on a CPU in pieces whose conversions stay in its cache."""
    size = PIECE if part.device.type == "cpu" else max(1, part.numel())
    for sums, piece in zip(total.view(-1).split(size), part.reshape(-1).split(size), strict=True):
        sums.add_(piece.double(), alpha=weight)  # float8 is not promoted


class _Sums:
    """Running sums of one layer's vectors, and of the weights behind each, on the device of its spectrum."""

    def __init__(self, spectrum: Spectrum) -> None:
        self._kept = spectrum
        self._u = torch.zeros_like(spectrum.u, dtype=torch.float64)
        self._v = torch.zeros_like(spectrum.v, dtype=torch.float64)
        self._weights = torch.zeros(spectrum.u.shape[1], dtype=torch.float64, device=spectrum.u.device)
        self._unchanged = torch.zeros_like(self._weights)  # of the clients that hold each term as it was sent

    def add(self, indices: Tensor, u: Tensor, v: Tensor, weight: float) -> None:
        columns = self._kept.columns(indices)
        self._weights[columns] += weight
        for sums, part in ((self._u, u), (self._v, v)):
            sums.index_add_(1, columns, part.double() * weight)

    def hold(self, indices: Tensor, weight: float) -> None:
        self._unchanged[self._kept.columns(indices)] += weight

    def means(self) -> tuple[Tensor, Tensor]:
        """Return ū and v̄, float64, in the memory of the sums; a vector that nobody trains is as it was."""
        trained, mixed = self._weights > 0, (self._weights > 0) & (self._unchanged > 0)
        total = self._weights + self._unchanged
        for sums, kept in ((self._u, self._kept.u), (self._v, self._kept.v)):
            sums[:, mixed] += kept[:, mixed].double() * self._unchanged[mixed]
            sums.div_(total.where(trained, total.new_ones(())))
            sums[:, ~trained] = kept[:, ~trained].double()
        return self._u, self._v


def _no_weight(value: object) -> str:
    remedy = "; pass its .item()" if isinstance(value, Tensor) else ""
    return f"its weight is {safe_repr(value)}, not a finite number above 0{remedy}"


def _is_positive(value: object) -> TypeGuard[float]:
    return is_number(value) and value > 0
