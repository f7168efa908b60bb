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
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sharding.planner import Client, Plan
from sharding.shard import Shard, Terms, as_real, key
from sharding.spectrum import Spectrum
from sharding.wrappers import spread_like, unwrap

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

    Returns:
        Who was left out and why: nothing returned, other layers or shapes, NaN or Inf. If nobody is left the model
        stays as it was.
    """
    average = Average(plan, num_samples)
    for client, shard in ((c, updates[c]) for c in plan if c in updates) if isinstance(updates, Mapping) else updates:
        average.add(client, shard)
    return average.write_to(model, total, server_lr)


class Average:
    """The average of a round's updates, as far as they have arrived.

    Args:
        plan: the round's shards as sent.
        weights: D_c, or D_c/p_c, of those who are to be heard.
    """

    def __init__(self, plan: Plan, weights: Mapping[Client, float]) -> None:
        self._plan = plan
        self._weights = {client: float(weights[client]) for client in plan if client in weights}
        self._faults: dict[Client, str | None] = {}
        self._total = 0.0
        self._dense: dict[str, Tensor] = {}
        self._layers: dict[str, _Sums] = {}

    @torch.no_grad()
    def add(self, client: Client, shard: Shard | None) -> None:
        """Sum a client's update up, if the client is to be heard and there is nothing wrong with it."""
        if client not in self._weights:
            return
        fault = self._faults[client] = find_fault(self._plan[client], shard)
        if fault is not None or shard is None:
            return
        weight = self._weights[client]
        self._total += weight
        for name, tensor in shard.dense.items():
            if name in self._dense:
                self._dense[name].add_(tensor, alpha=weight)
            else:
                self._dense[name] = tensor.double() * weight
        for name, terms in shard.terms.items():
            if name not in self._layers:
                self._layers[name] = _Sums(self._plan.spectra[name])
            self._layers[name].add(terms, weight)

    @torch.no_grad()
    def write_to(self, model: nn.Module, total: float | None = None, server_lr: float = 1.0) -> Aggregation:
        """Give the server's model the averaged values, if there are any, and say who was averaged in.

        Args:
            model: the dense model that the plan was made from.
            total: ΣD over all who might have been heard, by which dense parameters' weights are divided; their own sum
                by default. If some of those to be heard sent nothing usable the others stand for them: the total
                shrinks in proportion to the weight that is lost.
            server_lr: η_g, the share of the way from the old model to the aggregate.
        """
        state = unwrap(model).state_dict(keep_vars=True)
        divisor = self._total if total is None else total * self._total / sum(self._weights.values() or [1.0])
        for name, running in self._dense.items():
            sent = next(iter(self._plan.values())).dense[name]
            _move(as_real(state[name]), _step(running, sent, self._total, divisor), server_lr)
        for name, sums in self._layers.items():
            weight = state[key(name, "weight")]
            _move(weight, sums.recompose().view_as(weight), server_lr)
        faults = {client: self._faults.get(client, NOTHING) for client in self._weights}
        return Aggregation(
            [client for client, fault in faults.items() if fault is None],
            {client: fault for client, fault in faults.items() if fault is not None},
        )


def _step(weighted_sum: Tensor, sent: Tensor, weight: float, total: float) -> Tensor:
    """Return x + Σ weight_c·(x_c − x)/total, from Σ weight_c·x_c; the average where the weights sum to the total."""
    if weight != total:
        weighted_sum = weighted_sum.add(sent, alpha=total - weight)
    return weighted_sum / total


def _move(weight: Tensor, target: Tensor, server_lr: float) -> None:
    """Go η_g of the way to the target, in place."""
    target = spread_like(target, weight)
    weight.copy_(target if server_lr == 1.0 else weight + server_lr * (target - weight))


NOTHING = "nothing returned"


def find_fault(sent: Shard, returned: Shard | None) -> str | None:
    """Say in a few words what is wrong with a client's update, or None if it can be averaged."""
    if returned is None:
        return NOTHING
    ours, theirs = sent.trained(), returned.trained()
    if ours.keys() != theirs.keys():
        return f"other layers: {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}"
    for name, tensor in theirs.items():
        if tensor.shape != ours[name].shape:
            return f"{name} has shape {tuple(tensor.shape)}, not {tuple(ours[name].shape)}"
    sums = torch.stack([tensor.sum() for tensor in theirs.values()])
    if bool(sums.isfinite().all()):  # a NaN or Inf would show in its sum, and one pass finds that out
        return None
    finite = torch.stack([tensor.isfinite().all() for tensor in theirs.values()])
    if not bool(finite.all()):
        return f"NaN or Inf in {next(name for name, fine in zip(theirs, finite.tolist(), strict=True) if not fine)}"
    return None


class _Sums:
    """Running sums of one layer's vectors, and of the weights behind each."""

    def __init__(self, spectrum: Spectrum) -> None:
        self._kept = spectrum
        self._u = torch.zeros_like(spectrum.u, dtype=torch.float64)
        self._v = torch.zeros_like(spectrum.v, dtype=torch.float64)
        self._weights = torch.zeros(spectrum.u.shape[1], dtype=torch.float64, device=spectrum.u.device)

    def add(self, terms: Terms, weight: float) -> None:
        device = self._weights.device
        indices = terms.indices.to(device)
        self._weights[indices] += weight
        for sums, part in ((self._u, terms.u), (self._v, terms.v)):
            sums.index_add_(1, indices, part.to(device).double() * weight)

    def recompose(self) -> Tensor:
        """Return W (out, in) after averaging each vector over those who hold it."""
        return self._mean(self._u, self._kept.u) @ self._mean(self._v, self._kept.v).mT

    def _mean(self, sums: Tensor, kept: Tensor) -> Tensor:
        weights = self._weights
        return torch.where(weights > 0, sums / weights.clamp(min=torch.finfo(torch.float64).tiny), kept.double())
