"""The number of successes among independent trials with unequal chances (the Poisson-binomial distribution).

The generating function of the count is a product, Π_j (1 − p_j + p_j·z), and the chance of `count` is its
coefficient: an average of the product times z^−count over the unit circle. When Σp = count, the circle passes
through the saddle point, so nothing cancels; *leaving a trial out is dividing by its factor*. Hence all N
leave-one-out chances cost N × angles operations, with none of the instability of recursions (Chen & Liu 1997)
or of deconvolution near p = 1.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]


def half_circle(variance: float, size: int) -> Complexes:
    """Points of the upper half of the unit circle on which a mean gives a chance to double precision.

    M equally spaced angles replace Pr(S = count) by Σ_j ±Pr(S = count + jM). By Bernstein's inequality the
    unwanted terms are below e^−39 once M² ≥ 26M + 78·variance, and absent once M > size. The angles are
    shifted by half a step: −1, where the factor of a fair coin vanishes, is never among them. The lower
    half is conjugate.

    Args:
        variance: Σ p(1 − p), or an upper bound of it.
        size: the number of trials.

    Returns:
        (H,) complex, H = M/2.
    """
    bernstein = 13.0 + np.sqrt(169.0 + 78.0 * variance)
    half = (min(int(np.ceil(bernstein)), size + 1) + 1) // 2
    return np.exp(1j * np.pi * (np.arange(half) + 0.5) / half)


def inverse_moduli(p: Floats, z: Complexes) -> Floats:
    """Return 1/|1 − p + p·z|² for every trial and point, without cancellation at p = ½: (..., N) -> (..., N, H)."""
    cos2 = (1.0 + z.real) / 2.0
    return 1.0 / (cos2 + ((1.0 - 2.0 * p) ** 2)[..., None] * (1.0 - cos2))


def generating_function(p: Floats, z: Complexes) -> Complexes:
    """Π_j (1 − p_j + p_j·z): (..., N) chances and (H,) points -> (..., H)."""
    return np.asarray(np.prod(1.0 + p[..., None] * (z - 1.0), axis=-2))


def leave_one_out(p: Floats, count: int) -> tuple[Floats, Floats, float]:
    """Chances of `count − 1` and of `count` successes without trial i, for every i, and of `count` with all.

    Args:
        p: (N,) chances of success in [0, 1], Σp near `count`.
        count: number of successes.

    Returns:
        (N,), (N,) and a number; absolute error about 1e-16.
    """
    z = half_circle(float(p @ (1.0 - p)), p.size)
    phi = generating_function(p, z) * z ** (-count)
    # Re(phi·z/f) = Re(phi·z·conj f)/|f|² is linear in (1 − p, p), which leaves one real matrix product.
    columns = np.stack([(phi * z).real, phi.real, (phi / z).real], axis=1) / z.size
    above, at, below = (inverse_moduli(p, z) @ columns).T
    return (1.0 - p) * above + p * at, (1.0 - p) * at + p * below, float(phi.real.mean())


def sigmoid(log_odds: Floats) -> Floats:
    """1/(1 + e^−x), accurate in both tails and safe at ±∞."""
    small = np.exp(-np.abs(log_odds))
    return np.where(log_odds >= 0.0, 1.0, small) / (1.0 + small)


def tilt(log_odds: Floats, count: float) -> Floats:
    """Add to each row of log-odds the constant that makes the chances sum to `count` (the saddle point).

    Newton's method with steps of at most 2: the sum is increasing in the constant, and every use of the
    result is exact for any constant near the right one. Rows in which no constant suffices stop where they
    are.

    Args:
        log_odds: (..., N), finite or ±∞.
        count: the wanted sum, between the number of +∞ and of those above −∞.

    Returns:
        (..., 1), to be added.
    """
    shift = np.zeros((*log_odds.shape[:-1], 1))
    for _ in range(60):
        p = sigmoid(log_odds + shift)
        missing = count - p.sum(-1, keepdims=True)
        slope = (p * (1.0 - p)).sum(-1, keepdims=True)
        if np.all(np.abs(missing) <= 1e-6 * np.sqrt(slope) + 1e-12):
            break
        shift += np.clip(missing / np.maximum(slope, 1e-300), -2.0, 2.0)
    return shift
