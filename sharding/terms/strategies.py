"""The strategies by name: how likely each term is drawn (π), how it is weighted (ω), and whether clients clip.

The core of a strategy is a function of one layer's spectrum and the clients' keep ratio. To add a strategy, write this
function and add a line to `STRATEGIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sharding.errors import UserError, lookup, safe_repr
from sharding.terms.inclusion import (
    collective_inclusion,
    optimal_inclusion,
    schatten_inclusion,
    successive_inclusion,
)
from sharding.validation import Vector, as_floats, check_probabilities, is_number, typed

# PriSM draws in proportion to λᵏ. λ below this share of the largest is raised to it, since λ⁴ would underflow.
PRISM_FLOOR = 1e-7


class LayerContext(NamedTuple):
    """The input of a strategy's function: one layer, and the clients of one keep ratio in one round.

    Attributes:
        magnitudes: λ, shape (N,), non-increasing.
        num_terms: n.
        num_clients: C, the clients of this keep ratio in the round.
        keep_ratio: r.
    """

    magnitudes: Vector
    num_terms: int
    num_clients: int
    keep_ratio: float


class Allocation(NamedTuple):
    """A strategy's decision for one layer.

    Attributes:
        inclusion: π, shape (N,), Σπ = n.
        multipliers: ω of a term if it is drawn, shape (N,).
        weights: the weights of successive sampling, shape (N,), if the strategy needs it; None to use any design that
            has inclusion π.
    """

    inclusion: Vector
    multipliers: Vector
    weights: Vector | None = None

    def checked(self, size: int, num_terms: int) -> "Allocation":
        """Check an allocation of `num_terms` out of `size` terms, and return it with float64 vectors.

        Raises:
            UserError: a vector has another length, π is outside [0, 1] or does not sum to n, ω of a term that can be
                drawn is not finite and above 0, or of a term only one of π and its weight is above 0.
        """
        pi, omega = as_floats(self.inclusion, "π"), as_floats(self.multipliers, "ω")
        weights = None if self.weights is None else as_floats(self.weights, "weights")
        for what, values in (("π", pi), ("ω", omega), ("weights", weights)):
            if values is not None and values.shape != (size,):
                raise UserError(f"{what} has shape {values.shape}; one number for each of {size} terms is needed")
        check_probabilities(pi, "π")
        if not abs(pi.sum() - num_terms) <= 1e-6 * num_terms:
            raise UserError(
                f"the π sum to {pi.sum():g}; they must sum to {num_terms}, the number of terms at this keep ratio"
            )
        drawn = omega[pi > 0]
        if not (np.isfinite(drawn) & (drawn > 0)).all():
            raise UserError("ω of a term that can be drawn is not finite and above 0")
        if weights is not None and (bad := np.flatnonzero((weights > 0) != (pi > 0))).size:
            term = int(bad[0])
            raise UserError(
                f"term {term} has π = {pi[term]:g} and weight {weights[term]:g}; both must be above 0, or neither"
            )
        return Allocation(pi, omega, weights)


@dataclass(frozen=True)
class Strategy:
    """A way to choose and weight the terms of a shard.

    Attributes:
        summary: one line for lists and tables.
        allocate: a function from a `LayerContext` to an `Allocation`; None to shard nothing.
        clips: whether clients clip the steps of terms whose ω is above the planner's `clip` (τ).
        nested: whether a client's terms are the first of those of every stronger client, with ω = 1. Then it can hold
            the others as a tail (`ShardPlanner`).
        rescales: whether all drawn terms share ω = √(Σλ² / Σ_{drawn} λ²) instead of the allocation's ω.
        keep_ratio: one keep ratio for all clients; None to use the clients' own.
    """

    summary: str
    allocate: Callable[[LayerContext], Allocation] | None
    clips: bool = True
    nested: bool = False
    rescales: bool = False
    keep_ratio: float | None = None


Strategy.__init__ = typed(Strategy.__init__)  # type: ignore[method-assign]


def top_n(layer: LayerContext) -> Allocation:
    """The n largest terms, always; ω = 1."""
    inclusion = np.zeros_like(layer.magnitudes)
    inclusion[: layer.num_terms] = 1.0
    return Allocation(inclusion, np.ones_like(inclusion))


def prism(layer: LayerContext) -> Allocation:
    """Successive sampling in proportion to λᵏ, k = 4 for r ≤ 0.2, else 2.5; ω = 1 (Niu et al., TMLR 2023)."""
    relative = layer.magnitudes / (layer.magnitudes[0] or 1.0)
    weights = np.maximum(relative, PRISM_FLOOR) ** (4.0 if layer.keep_ratio <= 0.2 else 2.5)
    inclusion = successive_inclusion(weights, layer.num_terms)
    return Allocation(inclusion, np.ones_like(inclusion), weights)


def prism_wallenius(layer: LayerContext) -> Allocation:
    """PriSM's draw, made unbiased by ω = 1/π with its exact inclusion probabilities."""
    published = prism(layer)
    return published._replace(multipliers=_inverse(published.inclusion))


def unbiased(layer: LayerContext) -> Allocation:
    """The unbiased estimator of least discrepancy: π of Theorem 3.1, ω = 1/π."""
    inclusion = optimal_inclusion(layer.magnitudes, layer.num_terms)
    return Allocation(inclusion, _inverse(inclusion))


def collective(layer: LayerContext) -> Allocation:
    """The estimator whose average over the group's C clients has least discrepancy: π and ω of Theorem 3.2."""
    return Allocation(*collective_inclusion(layer.magnitudes, layer.num_terms, layer.num_clients))


def schatten(layer: LayerContext) -> Allocation:
    """The unbiased estimator of least expected Schatten-4 discrepancy; ω = 1/π."""
    inclusion = schatten_inclusion(layer.magnitudes, layer.num_terms, p=4)
    return Allocation(inclusion, _inverse(inclusion))


STRATEGIES: dict[str, Strategy] = {
    "top_n": Strategy("the n largest terms", top_n, nested=True),
    "top_n_scaled": Strategy("the n largest terms, rescaled to the layer's norm", top_n, clips=False, rescales=True),
    "prism": Strategy("drawn in proportion to λᵏ", prism),
    "prism_scaled": Strategy("PriSM, rescaled to the layer's norm", prism, clips=False, rescales=True),
    "prism_wallenius": Strategy("PriSM with ω = 1/π", prism_wallenius, clips=False),
    "prism_wallenius_clip": Strategy("PriSM with ω = 1/π and clipping", prism_wallenius),
    "unbiased": Strategy("unbiased, least discrepancy of one client", unbiased),
    "collective": Strategy("least discrepancy of the clients' average", collective),
    "schatten": Strategy("unbiased, least Schatten-4 discrepancy", schatten),
    "full": Strategy("all terms to every client, factorized", top_n, keep_ratio=1.0),
    "dense": Strategy("no sharding: FedAvg", None),
}


def get_strategy(strategy: str | Strategy) -> Strategy:
    """Return the strategy of that name.

    Raises:
        UserError: the name is unknown (the message lists all names), or the value is not a `Strategy`.
    """
    chosen = strategy if isinstance(strategy, Strategy) else lookup(STRATEGIES, strategy, "strategy")
    if not isinstance(chosen, Strategy):
        raise UserError(
            f"strategy {strategy!r} is {safe_repr(chosen)}; pass Strategy('what it does, in a line', function)"
        )
    return chosen


def num_terms(rank: int, keep_ratio: float) -> int:
    """Return n = ⌈N·r⌉, the singular terms that keep ratio r in (0, 1] keeps of a layer of rank N.

    Raises:
        UserError: the keep ratio is outside (0, 1], or not a number.
    """
    if not (is_number(keep_ratio) and 0 < keep_ratio <= 1):
        numeric = isinstance(keep_ratio, float | int) and not isinstance(keep_ratio, bool)
        wrong = "outside (0, 1]" if numeric else f"of type {type(keep_ratio).__name__}, not a number in (0, 1]"
        raise UserError(
            f"keep ratio {safe_repr(keep_ratio)} is {wrong}; 0.2 keeps a fifth of each layer's singular terms"
        )
    return ceil(rank * keep_ratio * (1 - 1e-7))  # 10·0.3 is 3.0000000000000004, and 0.2 in float32 is above 0.2


def norm_ratio(magnitudes: Vector, indices: NDArray[np.int64]) -> float:
    """Return √(Σλ² / Σ_{drawn} λ²), the ω that gives the drawn terms the Frobenius norm of the layer (`+Scaled`)."""
    drawn = np.square(magnitudes[indices]).sum()
    return float(np.sqrt(np.square(magnitudes).sum() / drawn)) if drawn > 0 else 1.0


def _inverse(inclusion: Vector) -> Vector:
    """Return 1/π, and 1 for terms that are never drawn."""
    return np.divide(1.0, inclusion, out=np.ones_like(inclusion), where=inclusion > 0)
