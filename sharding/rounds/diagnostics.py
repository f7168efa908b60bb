"""Measure how a strategy behaves: evenness of π, reconstruction error, coverage, agreement with FedAvg.

With orthonormal u, v and Sᵢ the number of the C clients' draws that hold term i, each with multiplier ωᵢ, the
average of the clients' estimators is W̄ = Σ λᵢ·(ωᵢSᵢ/C)·uᵢvᵢᵀ, so ‖W − W̄‖²_F = Σ λᵢ²(1 − ωᵢSᵢ/C)². Its expectation
depends only on π and ω.
"""

from collections.abc import Iterable
from math import nan

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sharding.rounds.plan import Draw, Plan
from sharding.validation import Vector


def bernoulli_entropy(probability: Vector | float) -> Vector:
    """Return −p ln p − (1−p) ln(1−p), elementwise, in nats; 0 at 0 and 1."""
    p = np.asarray(probability, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, -p * np.log(p), 0.0) + np.where(p < 1, -(1 - p) * np.log1p(-p), 0.0)
    return np.asarray(terms)


def anme(inclusions: Iterable[Vector]) -> float:
    """Return the average normalized marginal entropy: mean Bernoulli entropy of π over that of n/N, over layers.

    1 if all terms are equally likely, 0 if the draw is certain. Layers with n = N have no entropy to compare with and
    are left out; if no others exist, the value is NaN.
    """
    ratios = []
    for inclusion in inclusions:
        even = float(bernoulli_entropy(inclusion.mean()))
        if even > 1e-12:
            ratios.append(float(bernoulli_entropy(inclusion).mean()) / even)
    return float(np.mean(ratios)) if ratios else nan


def plan_anme(plan: Plan) -> float:
    """Return the ANME of a round, over its layers and groups; NaN if nothing is drawn."""
    return anme(draw.allocation.inclusion for draw in plan.draws.values())


def plan_discrepancy(plan: Plan) -> tuple[float, float]:
    """Return the relative squared errors of a round's draw: of the clients' average, and of one client.

    The first is ‖W − W̄‖²/‖W‖², W̄ the unweighted average of all clients' estimators, whose expectation is Eq. 7; the
    second is the mean over clients of ‖W − Ŵ‖²/‖W‖², whose expectation is Eq. 4. Both sum over layers first. They
    hold for mixed keep ratios and multipliers that depend on the draw. The terms of a client's tail count as exact,
    without their rounding. NaN if nothing is sharded, or without clients.
    """
    num_clients = sum(map(len, plan.groups.values()))
    if num_clients == 0:
        return nan, nan
    collective = single = norm = 0.0
    by_layer: dict[str, dict[float, Draw]] = {}
    for (ratio, name), draw in plan.draws.items():
        by_layer.setdefault(name, {})[ratio] = draw
    for name, draws in by_layer.items():
        most = plan.spectra[name].indices.cpu().numpy()  # with tails, those of the strongest clients
        in_tail = {ratio: most if name in plan.tails.get(ratio, ()) else most[:0] for ratio in draws}
        coefficients = np.concatenate([_coefficients(draw, in_tail[ratio]) for ratio, draw in draws.items()])
        squares = next(iter(draws.values())).context.magnitudes ** 2
        collective += float(squares @ (1 - coefficients.sum(axis=0) / num_clients) ** 2)
        single += float(((1 - coefficients) ** 2 @ squares).mean())
        norm += float(squares.sum())
    return (collective / norm, single / norm) if norm > 0 else (nan, nan)


def plan_coverage(plan: Plan) -> float:
    """Return the share of a round's singular terms that at least one client holds, mean over layers, in 0…1.

    A term that no client holds keeps its value for the round. NaN if nothing is sharded.
    """
    shares = [spectrum.indices.numel() / spectrum.magnitudes.numel() for spectrum in plan.spectra.values()]
    return float(np.mean(shares)) if shares else nan


def alignment(update: Tensor, reference: Tensor) -> float:
    """Return the cosine between two updates of a model, each flattened to one vector; NaN if either is zero."""
    ours, theirs = update.double(), reference.double()
    norms = ours.norm() * theirs.norm()
    return float(ours @ theirs / norms) if norms > 0 else nan


def _coefficients(draw: Draw, in_tail: NDArray[np.int64]) -> Vector:
    """Return the terms' coefficients in each client's estimator: ω if drawn, 1 in the tail, else 0; shape (C, N)."""
    coefficients = np.zeros((len(draw.indices), draw.context.magnitudes.size))
    coefficients[:, in_tail] = 1.0
    np.put_along_axis(coefficients, draw.indices, draw.multipliers, axis=1)
    return coefficients
