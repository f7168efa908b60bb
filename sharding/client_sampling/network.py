"""The duration of a round on a shared wireless channel, and the clients' speeds.

Client i computes for τ_i seconds and then sends for t_i/f_i seconds over a band of width f_i. The server splits its
band f_tot so that all clients finish at the same, earliest possible time T: f_i = t_i/(T − τ_i), Σ f_i = f_tot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from sharding.errors import UserError, safe_repr
from sharding.validation import Vector, as_alike, is_number

Distribution = float | tuple[float, float]  # the mean of an exponential distribution, or (least, most) of a uniform one
LEAST_BANDWIDTH = 1e-150


def round_time(compute: ArrayLike, communicate: ArrayLike, bandwidth: float) -> float:
    """Solve Σ_i t_i/(T − τ_i) = f_tot for the one T > max τ.

    1/Σ t/(T − τ) is increasing and concave in T. Newton's method, started at max(τ + t/f_tot), climbs to the root
    without passing it; with one client the first step is exact.

    Args:
        compute: (K,) τ ≥ 0 of the participants, in seconds.
        communicate: (K,) t ≥ 0, seconds of sending times unit of bandwidth.
        bandwidth: f_tot > 0.

    Returns:
        T in seconds; 0 for an empty cohort.

    Raises:
        UserError: times are negative, not finite or of different lengths, or the bandwidth is not above 0.

    Source: Luo et al. 2024 (arXiv 2404.13804), the adaptive bandwidth allocation of a round.
    """
    tau, t = as_alike(compute=compute, communicate=communicate)
    f_tot = positive_bandwidth(bandwidth)
    if tau.size == 0:
        return 0.0
    slowest, sends = float(tau.max()), t > 0.0
    if not sends.any():
        return slowest
    last, t = float(tau[sends].max()), t[sends] / f_tot
    slack = last - tau[sends]
    wait = float((t - slack).max())  # T − last, which is solved for since it is small beside T where sending is
    for _ in range(100):
        load = t / (wait + slack)
        total, slope = float(load.sum()), float((load / (wait + slack)).sum())  # 1 at the root, minus its derivative
        step = (total - 1.0) * total / slope
        if step <= 4e-16 * wait:
            break
        wait += step
    return max(last + wait, slowest)


@dataclass(frozen=True)
class Profiles:
    """The clients' speeds and the band that they share.

    Attributes:
        compute: (N,) τ, seconds of local training.
        communicate: (N,) t, seconds of sending times bandwidth.
        bandwidth: f_tot.

    Raises:
        UserError: times are negative, not finite or of different lengths, or the bandwidth is not above 0.
    """

    compute: Vector
    communicate: Vector
    bandwidth: float

    def __post_init__(self) -> None:
        compute, communicate = as_alike(compute=self.compute, communicate=self.communicate)
        object.__setattr__(self, "compute", compute)
        object.__setattr__(self, "communicate", communicate)
        object.__setattr__(self, "bandwidth", positive_bandwidth(self.bandwidth))

    @classmethod
    def draw(
        cls,
        num_clients: int,
        bandwidth: float,
        rng: np.random.Generator,
        compute: Distribution = 1.0,
        communicate: Distribution = 1.0,
    ) -> Self:
        """Draw τ and t, each from an exponential distribution with a mean or a uniform one from least to most."""
        tau, t = (_drawn(distribution, num_clients, rng) for distribution in (compute, communicate))
        return cls(tau, t, bandwidth)

    def costs(self, cohort_size: int) -> Vector:
        """Return c_i = K t_i/f_tot + τ_i, (N,), the seconds that drawing client i adds to the expected round time."""
        return cohort_size * self.communicate / self.bandwidth + self.compute

    def round_time(self, cohort: Sequence[int], senders: Sequence[int] | None = None) -> float:
        """Return T in seconds of a round in which `cohort` computes and `senders` (by default all) send.

        If not all send, sending starts when all have computed, since only then the senders are known.
        """
        rows = np.asarray(cohort, dtype=np.int64)
        if senders is None:
            return round_time(self.compute[rows], self.communicate[rows], self.bandwidth)
        sending = float(self.communicate[np.asarray(senders, dtype=np.int64)].sum()) / self.bandwidth
        return float(self.compute[rows].max(initial=0.0)) + sending


def positive_bandwidth(bandwidth: float) -> float:
    """Return a float, or raise a UserError unless it is finite and above 1e-150, below which times overflow."""
    if not (is_number(bandwidth) and bandwidth > LEAST_BANDWIDTH):
        raise UserError(f"bandwidth is {safe_repr(bandwidth)}; a finite number above {LEAST_BANDWIDTH:g} is needed")
    return float(bandwidth)


def _drawn(distribution: Distribution, count: int, rng: np.random.Generator) -> Vector:
    return (
        rng.uniform(*distribution, count) if isinstance(distribution, tuple) else rng.exponential(distribution, count)
    )
