"""Per-vector averaging: u'ᵢ ← Σ D_c u'ᵢ⁽ᶜ⁾ / Σ D_c over the clients c that hold term i; v' alike.

Each vector is averaged on its own, over those who drew it; a term that nobody drew keeps its value. Dense parameters
are averaged over all. Then W = Σ u'ᵢ v'ᵢᵀ; the multipliers do not enter. Sums are taken in float64 and in the order of
the plan, so that neither the number of workers nor the order of arrival shows in the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sharding.planner import Client, Plan
from sharding.shard import Shard, Terms
from sharding.spectrum import Spectrum


@dataclass
class Aggregation:
    """Who was averaged in, and who was left out and why."""

    accepted: list[Client] = field(default_factory=list)
    rejected: dict[Client, str] = field(default_factory=dict)


@torch.no_grad()
def aggregate(
    model: nn.Module, plan: Plan, updates: Mapping[Client, Shard | None], num_samples: Mapping[Client, float]
) -> Aggregation:
    """Average the clients' updates into the server's model, in place.

    Args:
        model: the dense model that `plan` was made from.
        plan: the round's shards as sent.
        updates: the shards as returned; a client that is missing or None sent nothing.
        num_samples: D_c, the weight of each client.

    Returns:
        Who was left out and why: nothing returned, other layers or shapes, NaN or Inf. If nobody is left the model
        stays as it was.
    """
    outcome = Aggregation()
    for client, sent in plan.items():
        fault = find_fault(sent, updates.get(client))
        if fault is None:
            outcome.accepted.append(client)
        else:
            outcome.rejected[client] = fault
    heard = [(shard, float(num_samples[client])) for client in outcome.accepted if (shard := updates[client])]
    if not heard:
        return outcome
    state = model.state_dict(keep_vars=True)
    for name, mean in _average_dense(heard).items():
        state[name].copy_(mean)
    for name, spectrum in plan.spectra.items():
        weight = state[f"{name}.weight"]
        weight.copy_(_recompose(spectrum, [(shard.terms[name], weight) for shard, weight in heard]).view_as(weight))
    return outcome


def find_fault(sent: Shard, returned: Shard | None) -> str | None:
    """Say in a few words what is wrong with a client's update, or None if it can be averaged."""
    if returned is None:
        return "nothing returned"
    ours, theirs = _tensors(sent), _tensors(returned)
    if ours.keys() != theirs.keys():
        return f"other layers: {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}"
    for name, tensor in theirs.items():
        if tensor.shape != ours[name].shape:
            return f"{name} has shape {tuple(tensor.shape)}, not {tuple(ours[name].shape)}"
    finite = torch.stack([tensor.isfinite().all() for tensor in theirs.values()])
    if not bool(finite.all()):
        return f"NaN or Inf in {next(name for name, fine in zip(theirs, finite.tolist(), strict=True) if not fine)}"
    return None


def _tensors(shard: Shard) -> dict[str, Tensor]:
    """Return what a client may change: u and v of every layer, and the dense rest."""
    factors = {f"{name}.{part}": getattr(terms, part) for name, terms in shard.terms.items() for part in "uv"}
    return factors | dict(shard.dense)


def _average_dense(heard: list[tuple[Shard, float]]) -> dict[str, Tensor]:
    total = sum(weight for _, weight in heard)
    first, first_weight = heard[0]
    sums = {name: tensor.double() * first_weight for name, tensor in first.dense.items()}
    for shard, weight in heard[1:]:
        for name, running in sums.items():
            running.add_(shard.dense[name], alpha=weight)
    return {name: running / total for name, running in sums.items()}


def _recompose(spectrum: Spectrum, held: list[tuple[Terms, float]]) -> Tensor:
    """Return W (out, in) after averaging each vector over those who hold it."""
    device = spectrum.u.device
    sizes = [len(terms.indices) for terms, _ in held]
    indices = torch.cat([terms.indices.to(device) for terms, _ in held])
    weights = torch.repeat_interleave(
        torch.tensor([weight for _, weight in held], dtype=torch.float64), torch.tensor(sizes)
    ).to(device)
    totals = torch.zeros(spectrum.u.shape[1], dtype=torch.float64, device=device).index_add_(0, indices, weights)

    def averaged(kept: Tensor, returned: list[Tensor]) -> Tensor:
        sums = torch.zeros_like(kept, dtype=torch.float64)
        sums.index_add_(1, indices, torch.cat([part.to(device) for part in returned], dim=1) * weights)
        return torch.where(totals > 0, sums / totals.clamp(min=torch.finfo(torch.float64).tiny), kept.double())

    u = averaged(spectrum.u, [terms.u for terms, _ in held])
    v = averaged(spectrum.v, [terms.v for terms, _ in held])
    return u @ v.mT
