"""How the draws of one group's clients hang together.

The server holds all the draws, so it may coordinate them as survey statisticians do, without touching any client's
own law: always exactly n distinct terms, term i with chance πᵢ, and no client treated differently from another.

- independent: each client draws for itself, as published. Term i goes to a binomial number of clients.
- spread (negative coordination): term i goes to ⌊Cπᵢ⌋ or ⌈Cπᵢ⌉ clients, so the clients' average is far closer to W.
- shared (positive coordination): all clients hold the same terms, so each vector is averaged over all of them.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sharding.designs import Design, fit
from sharding.rng import Key

Indices = NDArray[np.int64]
Generators = Callable[[Key], np.random.Generator]  # from a client, or a purpose of the whole group, to its generator
Coordination = Callable[[Design, Sequence[Key], Generators], Indices]


def independent(design: Design, clients: Sequence[Key], rng_of: Generators) -> Indices:
    """Draw for each client on its own: (C, n), ascending rows."""
    return np.stack([design.draw(rng_of(client)) for client in clients])


def shared(design: Design, clients: Sequence[Key], rng_of: Generators) -> Indices:
    """Draw once for all clients: (C, n), ascending rows, all the same."""
    return np.tile(design.draw(rng_of("shared")), (len(clients), 1))


def spread(design: Design, clients: Sequence[Key], rng_of: Generators) -> Indices:
    """Deal the terms out like cards: (C, n), ascending rows.

    The count Kᵢ of each term is Cπᵢ rounded at random: by conditional Poisson sampling of the fractional parts, so
    E Kᵢ = Cπᵢ and Σ Kᵢ = Cn. A deck with Kᵢ ≤ C copies of each term, side by side and in random order of the terms,
    is dealt round the table: nobody gets a term twice, everybody gets n. Seats are assigned at random, hence
    Pr(client holds i) = E Kᵢ/C = πᵢ.
    """
    rng = rng_of("spread")
    counts = round_at_random(len(clients) * design.inclusion, rng)
    order = rng.permutation(counts.size)
    hands = np.repeat(order, counts[order]).reshape(design.num_terms, len(clients)).T
    seats = np.argsort(np.argsort([rng_of(client).random() for client in clients]))
    return np.sort(hands[seats], axis=1)


def round_at_random(expected: NDArray[np.float64], rng: np.random.Generator) -> Indices:
    """Round each number down or up so that each keeps its mean and the sum, a whole number, stays as it is: (N,)."""
    nearest = np.round(expected)
    expected = np.where(np.abs(expected - nearest) < 1e-9, nearest, expected)
    counts = np.floor(expected).astype(np.int64)
    fractions = expected - counts
    if fractions.sum() > 0.5:
        counts[fit(fractions, "cps").draw(rng)] += 1
    return counts


COORDINATIONS: dict[str, Coordination] = {"independent": independent, "spread": spread, "shared": shared}
