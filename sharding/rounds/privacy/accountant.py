"""The account of a run's privacy: ε at δ after a number of rounds, by the Rényi accountant of `dp-accounting`.

Draws of terms give no amplification: the server publishes them, and all of a clipped change can lie in drawn terms. So
only the draw of clients counts. With any draw, T rounds spend at most what they would with all clients in each: that is
ε of one Gaussian mechanism with the multiplier z/√T (Dong et al. 2022), which is known exactly (Balle & Wang 2018).
"""

import logging
from bisect import bisect_left, bisect_right
from functools import lru_cache
from math import inf, sqrt
from typing import Any, Literal, get_args

import numpy as np

from sharding.errors import UserError, safe_repr
from sharding.validation import as_whole, is_number, is_whole

log = logging.getLogger(__name__)

Sampling = Literal["poisson", "fixed"]
NOISE = (1e-6, 1e6)  # multipliers that the formulas can compute with
MOST_ROUNDS = 10**9


def check_sampling(noise_multiplier: float, num_clients: int, per_round: float, sampling: Sampling) -> None:
    """Raise a UserError if what enters a mechanism's account is out of range; the arguments are those of `epsilon`."""
    least, most = NOISE
    if not (is_number(noise_multiplier) and (noise_multiplier == 0 or least <= noise_multiplier <= most)):
        allowed = f"0 for no noise, or a number from {least:g} to {most:g}, such as 1.0"
        raise UserError(f"noise_multiplier is {safe_repr(noise_multiplier)}; pass {allowed}")
    if not (is_number(per_round) and 0 < per_round <= num_clients):
        raise UserError(
            f"per_round is {safe_repr(per_round)}; pass the expected number of clients of a round, of the {num_clients}"
        )
    if sampling not in get_args(Sampling):
        raise UserError(f"sampling is {safe_repr(sampling)}; pass one of {', '.join(get_args(Sampling))}")
    if sampling == "fixed" and not is_whole(per_round):
        raise UserError(f"per_round is {per_round}; sampling='fixed' needs a whole number")


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
        num_clients: the number of clients in the population.
        per_round: clients of a round: their expected number, or with ``fixed`` their number.
        rounds: the number of rounds that were released.
        delta: δ, in (0, 1).
        sampling: ``poisson``, each client by its own coin, where neighbors differ in one client that is added or
            removed; or ``fixed``, every set of this size equally likely, where they differ in the data of one client. A
            sum then moves by up to twice the bound.

    Raises:
        UserError: an argument is out of range, or the package dp-accounting is missing.
    """
    if not (is_number(delta) and 0 < delta < 1):
        raise UserError(f"delta is {safe_repr(delta)}; pass a number between 0 and 1, below one over the clients")
    num_clients = as_whole(num_clients, "num_clients")
    rounds = as_whole(rounds, "rounds", MOST_ROUNDS, least=0)
    check_sampling(noise_multiplier, num_clients, per_round, sampling)
    return _epsilon(float(noise_multiplier), num_clients, float(per_round), rounds, float(delta), sampling)


@lru_cache(maxsize=1024)
def _epsilon(
    noise_multiplier: float, num_clients: int, per_round: float, rounds: int, delta: float, sampling: Sampling
) -> float:
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
        noise_multiplier /= 2  # over a sensitivity of twice the bound
        noise = dp_accounting.GaussianDpEvent(noise_multiplier)
        event = dp_accounting.SampledWithoutReplacementDpEvent(num_clients, int(per_round), noise)
    accountant = RdpAccountant(neighboring_relation=relation)
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # it warns of each order that it leaves out, which only makes ε larger
    try:
        with np.errstate(all="ignore"):  # −∞ is the logarithm of 0
            accountant.compose(event, rounds)
            unsampled = dp_accounting.get_epsilon_gaussian(noise_multiplier / sqrt(rounds), delta)
            return float(min(accountant.get_epsilon(delta), unsampled))
    finally:
        absl.setLevel(level)


def rounds_within(
    max_epsilon: float,
    noise_multiplier: float,
    num_clients: int,
    per_round: float,
    rounds: int,
    delta: float,
    sampling: Sampling = "poisson",
) -> int:
    """Return how many of these rounds a budget of ε allows; the other arguments are those of `epsilon`.

    Raises:
        UserError: as `epsilon`, or the budget is not a finite number above 0.
    """
    _check_budget(max_epsilon)
    rounds = as_whole(rounds, "rounds", MOST_ROUNDS, least=0)

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
    """Return the least noise multiplier, in steps of 1e-4, with which all of these rounds keep within a budget of ε.

    The other arguments are those of `epsilon`. Logs a warning where the budget is so small that the accountant sees no
    gain from the draw of clients.

    Raises:
        UserError: as `epsilon`, or the budget is not a finite number above 0, or no noise keeps it.
    """
    _check_budget(max_epsilon)
    most = NOISE[1]

    def within(steps: int) -> bool:
        return epsilon(steps / 1e4, num_clients, per_round, rounds, delta, sampling) <= max_epsilon

    noise = (1 + bisect_left(range(1, int(most * 1e4) + 1), True, key=within)) / 1e4  # ε falls with the noise
    if noise > most:
        raise UserError(
            f"max_epsilon is {max_epsilon:g}, and with a noise multiplier of {most:g} these rounds spend more; pass a "
            "larger one, or fewer rounds"
        )
    spent, of_all = (epsilon(noise, num_clients, each, rounds, delta, sampling) for each in (per_round, num_clients))
    if spent == of_all and per_round < num_clients and max_epsilon < 1:  # a large ε gains nothing from the draw
        log.warning(
            "max_epsilon=%g is below what the accountant can reach for a draw of clients, so it counts all of them in "
            "each round: the noise multiplier %.5g is larger than necessary",
            max_epsilon,
            noise,
        )
    return noise


def _check_budget(max_epsilon: float) -> None:
    if not (is_number(max_epsilon) and max_epsilon > 0):
        raise UserError(f"max_epsilon is {safe_repr(max_epsilon)}; pass a finite number above 0, such as 2.0")
