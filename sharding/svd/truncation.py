"""The largest singular terms of a weight, without the others.

Where less than half of the terms of a weight in single precision (or half) are wanted, the eigenvectors of the smaller
Gram matrix are computed in single precision, and the other side is Wᵀu, only for the n wanted. That is enough for
terms well above the rounding of a square, 1e-3 of the largest: what the kept terms hold is within 1e-6 of the best.
Otherwise the whole spectrum is computed, in float64. Of the Gram matrix's eigenvectors torch computes all; where
SciPy is installed and a quarter or fewer are wanted, LAPACK computes only these.
"""

import torch
from torch import Tensor

from sharding.svd.spectrum import decompose, lower_gram

SMALLEST = 1e-12  # a norm whose square is far from under- and overflow
FLOOR = 1e-2  # of the largest magnitude: single precision does not separate smaller terms from their neighbors
FEW = 1 / 4  # of a matrix's eigenvectors; computing up to this share takes less time than computing all


def largest_terms(blocks: Tensor, num_terms: int) -> tuple[Tensor, Tensor]:
    """Return u' and v' of the largest terms of every block, stacked.

    Args:
        blocks: shape (blocks, rows, columns); a weight is one block, but that of a grouped convolution.
        num_terms: n, of each block.

    Returns:
        u' (blocks·rows, n) and v' (blocks·columns, n), by non-increasing magnitude, in the dtype of `blocks`.
    """
    found = None
    if blocks.is_floating_point() and blocks.dtype != torch.float64 and 2 * num_terms <= min(blocks.shape[1:]):
        with torch.autocast(blocks.device.type, enabled=False):
            found = _by_single_precision(blocks.float(), num_terms)
    if found is None:
        spectrum = decompose({"": blocks})[""]
        return spectrum.u[:, :num_terms], spectrum.v[:, :num_terms]
    u, v = found
    return u.flatten(0, 1).to(blocks.dtype), v.flatten(0, 1).to(blocks.dtype)


def _by_single_precision(blocks: Tensor, num_terms: int) -> tuple[Tensor, Tensor] | None:
    """Return u' and v' of each block, or None if single precision is not enough."""
    wide = blocks.shape[1] <= blocks.shape[2]
    flat = blocks if wide else blocks.mT
    size = float(torch.linalg.vector_norm(flat))
    if not SMALLEST < size < 1 / SMALLEST:
        return None
    gram = lower_gram(flat).mT  # of which LAPACK reads the upper triangle, a little faster than the lower one
    short = _last_eigenvectors(gram, num_terms).flip(-1)
    long = short.mT @ flat  # one term per row
    magnitudes = torch.linalg.vector_norm(long, dim=2)[:, None]
    if not bool((magnitudes >= FLOOR * magnitudes.amax()).all()):
        return None
    root = magnitudes.sqrt()
    short, long = short * root, long.mT / root
    return (short, long) if wide else (long, short)


def _last_eigenvectors(gram: Tensor, count: int) -> Tensor:
    """Return the eigenvectors of the largest eigenvalues, ascending: (blocks, size, size) -> (blocks, size, count)."""
    if gram.device.type == "cpu" and count <= FEW * gram.shape[-1]:
        found = [vectors for block in gram if (vectors := _alone(block, count)) is not None]
        if len(found) == len(gram):
            return torch.stack(found)
    return torch.linalg.eigh(gram, UPLO="U").eigenvectors[:, :, -count:]


def _alone(gram: Tensor, count: int) -> Tensor | None:
    """Return the last eigenvectors of one matrix; None without SciPy, or if LAPACK fails, e.g. at equal eigenvalues."""
    try:
        from scipy.linalg import LinAlgError, eigh  # noqa: PLC0415 - the library does without
    except ImportError:
        return None
    wanted = (len(gram) - count, len(gram) - 1)
    try:
        found = eigh(gram.numpy(), lower=False, subset_by_index=wanted, driver="evx", check_finite=False)[1]
    except LinAlgError:
        return None
    return torch.from_numpy(found) if found.shape[1] == count else None
