"""Decide how many terms each layer keeps: by ratio, ratios for patterns, energy, or a budget for the whole model.

A budget buys the terms that hold most of ‖W‖² for their parameters. A layer whose terms would cost more than its dense
weight stays dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sharding.errors import UserError, safe_repr
from sharding.factorization.shardable import Pattern, aliases, matches, matching
from sharding.layers import num_blocks
from sharding.layers.base import dense_weight, matrices_of
from sharding.layers.decomposition import form_of
from sharding.matrices.spectrum import lower_gram
from sharding.terms.strategies import num_terms
from sharding.validation import is_number

GROWS = "would grow"
UNGIVEN = "no keep ratio is given for it"


@dataclass(frozen=True)
class Energy:
    """Keep the fewest terms of each layer that hold this share of ‖W‖², in (0, 1]."""

    share: float

    def __post_init__(self) -> None:
        if not (is_number(self.share) and 0 < self.share <= 1):
            raise UserError(
                f"energy {safe_repr(self.share)} is outside (0, 1]; 0.9 keeps nine tenths of each weight's square"
            )


@dataclass(frozen=True)
class Budget:
    """Keep this many parameters, and spend them on the terms that hold most of ‖W‖² for their size.

    Attributes:
        parameters: the number of parameters of the whole model, including all that stays dense.
    """

    parameters: int

    def __post_init__(self) -> None:
        if not is_number(self.parameters):
            raise UserError(f"a Budget of {safe_repr(self.parameters)} is not a number of parameters")


KeepRatio = float | Mapping[Pattern, float] | Energy | Budget


@dataclass(frozen=True)
class Cost:
    """The parameters of a layer's dense weight, and of each of its terms."""

    dense: int
    term: int

    @classmethod
    def of(cls, layer: nn.Module) -> "Cost":
        """Return a layer's costs, which are also its multiply-adds at one position."""
        weight = dense_weight(layer)
        return cls(weight.numel(), weight.shape[0] + weight.shape[1:].numel() * num_blocks(layer))


def count_terms(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    keep_ratio: KeepRatio,
    elsewhere: int,
) -> dict[str, int | str]:
    """Return n for each layer, or why it stays dense: no pattern of `keep_ratio` matches it, or it would grow.

    A ratio of 1 keeps all terms, even if the layer grows.

    Args:
        model: the model of the layers.
        layers: the layers to factorize, by name.
        keep_ratio: see `factorize`.
        elsewhere: parameters that stay dense, which count toward a budget.
    """
    if isinstance(keep_ratio, Budget | Energy):
        _check_values(layers, keep_ratio)
    if isinstance(keep_ratio, Budget):
        return _spend_budget(layers, keep_ratio.parameters, elsewhere)
    if isinstance(keep_ratio, Energy):
        spectra = {name: _magnitudes(layer) for name, layer in layers.items()}
        return {
            name: _unless_larger(layers[name], _terms_with_energy(spectra[name], keep_ratio.share)) for name in layers
        }
    if not isinstance(keep_ratio, Mapping):
        return {name: _by_ratio(layer, keep_ratio) for name, layer in layers.items()}
    for pattern in keep_ratio:
        matching(model, layers, pattern, "keep_ratio")
    known = aliases(model)
    ratios = {
        name: next((ratio for pattern, ratio in keep_ratio.items() if matches(model, pattern, known[name])), None)
        for name in layers
    }
    return {name: UNGIVEN if ratio is None else _by_ratio(layers[name], ratio) for name, ratio in ratios.items()}


def check_keep_ratio(keep_ratio: KeepRatio) -> None:
    """Raise a UserError if a ratio is outside (0, 1], or one of several is an `Energy` or a `Budget`."""
    if isinstance(keep_ratio, Mapping):
        for ratio in keep_ratio.values():
            num_terms(1, ratio)
    elif not isinstance(keep_ratio, Energy | Budget):
        num_terms(1, keep_ratio)


def _check_values(layers: Mapping[str, nn.Module], wanted: Energy | Budget) -> None:
    """Raise a UserError if a layer has no values to compute magnitudes from."""
    empty = [name for name, layer in layers.items() if dense_weight(layer).is_meta]
    if empty:
        raise UserError(
            f"{wanted} depends on the weights, and {empty[0]} is on the meta device; "
            "pass a keep ratio, or a model with values"
        )


def _by_ratio(layer: nn.Module, ratio: float) -> int | str:
    n = num_terms(form_of(layer).rank, ratio)
    return n if ratio == 1 else _unless_larger(layer, n)


def _unless_larger(layer: nn.Module, terms: int) -> int | str:
    """Return the number of terms, or `GROWS` if they take more parameters than the dense weight."""
    cost = Cost.of(layer)
    return GROWS if terms * cost.term > cost.dense else terms


def _magnitudes(layer: nn.Module) -> NDArray[np.float64]:
    """Return λ, non-increasing, shape (N,); of a grouped convolution √Σλ² over the groups."""
    blocks = matrices_of(layer).double()
    flat = blocks if blocks.shape[1] <= blocks.shape[2] else blocks.mT
    squares = torch.linalg.eigvalsh(lower_gram(flat)).clamp(min=0).flip(-1).sum(dim=0)
    values: NDArray[np.float64] = squares.sqrt().cpu().numpy()
    return values


def _terms_with_energy(magnitudes: NDArray[np.float64], share: float) -> int:
    """Return the fewest terms whose squares sum to a share of all."""
    kept = np.cumsum(magnitudes**2)
    return min(int(np.searchsorted(kept, share * kept[-1] * (1 - 1e-12))) + 1, len(kept))


def _spend_budget(layers: Mapping[str, nn.Module], total: int, elsewhere: int) -> dict[str, int | str]:
    costs = {name: Cost.of(layer) for name, layer in layers.items()}
    left = total - elsewhere
    least = sum(cost.term for cost in costs.values())
    if left < least:
        raise UserError(
            f"the budget of {total:,} is too small: {elsewhere:,} for what stays dense and {least:,} for one term of "
            "each layer are needed"
        )
    return allocate({name: _magnitudes(layer) for name, layer in layers.items()}, costs, left)


def allocate(
    spectra: Mapping[str, NDArray[np.float64]], costs: Mapping[str, Cost], budget: float
) -> dict[str, int | str]:
    """Return how many terms each layer keeps within a budget, at least one, or `GROWS` if it stays dense.

    Terms are bought in the order of λ² by cost. Where a further term would make a layer larger than its dense weight,
    this weight is bought instead.

    Args:
        spectra: λ by layer, non-increasing.
        costs: the cost of a term, by layer.
        budget: the budget for all layers; enough for one term of each.
    """
    terms: dict[str, int | str] = dict.fromkeys(spectra, 1)
    left = budget - sum(cost.term for cost in costs.values())
    worth = [(value**2 / costs[name].term, name) for name, values in spectra.items() for value in values[1:]]
    for _, name in sorted(worth, key=lambda pair: -pair[0]):
        n, cost = terms[name], costs[name]
        if isinstance(n, str):
            continue
        price = min(cost.term, cost.dense - n * cost.term)
        if price <= left:
            left -= price
            terms[name] = GROWS if price < cost.term else n + 1
    return terms
