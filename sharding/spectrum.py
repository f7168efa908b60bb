"""A weight matrix as a sum of singular terms: W = Σ u'ᵢ v'ᵢᵀ with u'ᵢ = √λᵢ·uᵢ and v'ᵢ = √λᵢ·vᵢ.

Matrices of one shape are decomposed together. The eigenvectors of the smaller Gram matrix, say WWᵀ, are one side of
the singular vectors; the other side is Wᵀu/λ. In float64 this is several times cheaper than an SVD and, as UUᵀW = W
for any orthonormal U, the recomposition is exact whatever the accuracy of λ. What the squaring does cost is the
orthogonality of terms whose λ is below about 1e-7 of the largest; a batch that has such terms goes through the SVD.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this share of the largest magnitude, squaring in float64 leaves fewer digits than float32 holds.
GRAM_FLOOR = 1e-5


@dataclass(frozen=True)
class Spectrum:
    """The singular terms of one matrix, by non-increasing magnitude.

    Attributes:
        magnitudes: λ, shape (N,), float64, N = min(out, in).
        u: u' = √λ·u, shape (out, N), in the matrix's dtype.
        v: v' = √λ·v, shape (in, N), in the matrix's dtype.
    """

    magnitudes: Tensor
    u: Tensor
    v: Tensor

    def compose(self) -> Tensor:
        """Return W = Σ u'ᵢ v'ᵢᵀ, shape (out, in)."""
        return self.u @ self.v.mT


def decompose(matrices: Mapping[str, Tensor]) -> dict[str, Spectrum]:
    """Decompose every matrix (out, in), those of one shape, dtype and device in one batched call.

    A term of magnitude zero gets a unit u' and v' = 0: the matrix is unchanged, and the term can train (with both
    sides zero its gradients would be zero for ever).
    """
    batches: dict[object, list[str]] = {}
    for name, matrix in matrices.items():
        batches.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(name)
    spectra: dict[str, Spectrum] = {}
    for names in batches.values():
        batch = torch.stack([matrices[name].detach() for name in names])
        spectra.update(zip(names, map(Spectrum, *_decompose_batch(batch)), strict=True))
    return {name: spectra[name] for name in matrices}


def decompose_one(matrix: Tensor) -> Spectrum:
    """Decompose a single matrix (out, in)."""
    return decompose({"": matrix})[""]


def _decompose_batch(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return magnitudes (B, N), u' (B, out, N) and v' (B, in, N) of a batch (B, out, in)."""
    wide = batch.shape[1] <= batch.shape[2]
    flat = (batch if wide else batch.mT).double()
    left, magnitudes, right = _gram_route(flat)
    if bool((magnitudes[:, -1] <= GRAM_FLOOR * magnitudes[:, 0]).any()):
        left, magnitudes, right = _svd_route(flat)
    root = magnitudes.sqrt()[:, None, :]
    null = magnitudes[:, None, :] == 0
    short = torch.where(null, left, left * root).to(batch.dtype)
    long = (right * root).to(batch.dtype)
    return (magnitudes, short, long) if wide else (magnitudes, long, short)


def _gram_route(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    squares, left = torch.linalg.eigh(flat @ flat.mT)
    magnitudes = squares.flip(-1).clamp(min=0).sqrt()
    left = left.flip(-1)
    return left, magnitudes, flat.mT @ left / magnitudes[:, None, :].clamp(min=torch.finfo(flat.dtype).tiny)


def _svd_route(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, magnitudes, right = torch.linalg.svd(flat, full_matrices=False)
    # What lies below the numerical rank is rounding: it counts as zero, lest factors of 1e-9 be sent out to train.
    noise = magnitudes[:, :1] * max(flat.shape[1:]) * torch.finfo(flat.dtype).eps
    return left, magnitudes * (magnitudes > noise), right.mT
