"""The account of a run's privacy: ε at δ after a number of rounds, by the Rényi accountant of `dp-accounting`.

Draws of terms give no amplification: the server publishes them, and all of a clipped change can lie in drawn terms. So
only the draw of clients counts.
"""

import logging
from bisect import bisect_right
from functools import lru_cache
from math import ceil, inf
from typing import Any, Literal

from sharding.errors import UserError, safe_repr
from sharding.validation import is_number

Sampling = Literal["poisson", "fixed"]
NEIGHBORS = {"poisson": "a client added or removed", "fixed": "a client's data replaced"}


@lru_cache(maxsize=1024)
def epsilon(
    noise_multiplier: float,
    num_clients: int,
    per_round: float,
    rounds: int,
    delta: float,
    sampling: Sampling = "poisson",
) -> float:
    """Return ε of (ε, δ)-differential privacy of one client after these rounds; infinite without noise.

    Args:
        noise_multiplier: z; the noise in the sum of clipped changes has the standard deviation z times their bound.
        num_clients: of the population.
        per_round: clients of a round: their expected number, or with ``fixed`` their number.
        rounds: that were released.
        delta: δ, in (0, 1).
        sampling: ``poisson``, each client by its own coin, where neighbors differ in one client that is added or
            removed; or ``fixed``, every set of this size equally likely, where they differ in the data of one client. A
            sum then moves by up to twice the bound.

    Raises:
        UserError: δ is out of range, or the package dp-accounting is missing.
    """
    if not (is_number(delta) and 0 < delta < 1):
        raise UserError(f"delta is {safe_repr(delta)}; pass a number between 0 and 1, below one over the clients")
    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return inf
    try:
        import dp_accounting  # noqa: PLC0415  # an extra, imported where used
        from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415
    except ImportError as error:
        raise UserError("differential privacy needs a package: pip install dp-accounting") from error
    event: Any
    if sampling == "poisson":
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        noise = dp_accounting.GaussianDpEvent(noise_multiplier)
        event = dp_accounting.PoissonSampledDpEvent(per_round / num_clients, noise)
    else:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        noise = dp_accounting.GaussianDpEvent(noise_multiplier / 2)  # over a sensitivity of twice the bound
        event = dp_accounting.SampledWithoutReplacementDpEvent(num_clients, int(per_round), noise)
    accountant = RdpAccountant(neighboring_relation=relation)
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of each order that it leaves out, which only makes ε larger
    try:
        accountant.compose(event, rounds)
        return float(accountant.get_epsilon(delta))
    finally:
        log.setLevel(level)


def rounds_within(
    max_epsilon: float,
    noise_multiplier: float,
    num_clients: int,
    per_round: float,
    rounds: int,
    delta: float,
    sampling: Sampling = "poisson",
) -> int:
    """Return how many of these rounds a budget of ε allows; the other arguments are those of `epsilon`."""

    def spent(count: int) -> float:
        return epsilon(noise_multiplier, num_clients, per_round, count, delta, sampling)

    return bisect_right(range(1, rounds + 1), max_epsilon, key=spent)  # ε grows with the rounds


def noise_for(
    max_epsilon: float,
    num_clients: int,
    per_round: float,
    rounds: int,
    delta: float,
    sampling: Sampling = "poisson",
) -> float:
    """Return the least noise multiplier, to four digits, with which all of these rounds keep within a budget of ε.

    The other arguments are those of `epsilon`.
    """

    def within(noise_multiplier: float) -> bool:
        return epsilon(noise_multiplier, num_clients, per_round, rounds, delta, sampling) <= max_epsilon

    low, high = 0.0, 1.0
    while not within(high):
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return ceil(high * 1e4) / 1e4
