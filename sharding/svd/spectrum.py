"""A weight matrix as a sum of singular terms: W = Σ u'ᵢ v'ᵢᵀ with u'ᵢ = √λᵢ·uᵢ and v'ᵢ = √λᵢ·vᵢ.

The eigenvectors of the smaller Gram matrix, say WWᵀ, are one side of the singular vectors; the other side is Wᵀu/λ. In
float64 this is several times cheaper than an SVD. The recomposition is exact whatever the accuracy of λ, since UUᵀW =
W for any orthonormal U. But squaring costs small terms their orthogonality: if some λ is below 1e-5 of the largest, an
SVD is computed instead.

A weight of several blocks (a grouped convolution) has a spectrum for each. Its term i is the i-th term of every block
at once, with the blocks' u' stacked, and their v' as well: these terms are orthogonal too, and λ² of one is the sum of
its blocks' λ².

On a GPU, matrices of one shape are decomposed in one batched call. On a CPU they are decomposed one after the other:
each has enough work for all cores, and batched products in float64 run slower.

All terms of a square matrix take twice as many numbers as the matrix. So `decompose` passes each spectrum to a
function that chooses what to keep of it, before it computes the next one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sharding.errors import UserError

# Below this share of the largest magnitude, squaring in float64 leaves fewer digits than float32 holds.
GRAM_FLOOR = 1e-5
STRIP = 128  # rows of a Gram matrix computed at once


@dataclass(frozen=True)
class Spectrum:
    """Singular terms of one matrix, by non-increasing magnitude: all N = min(out, in), or those that are kept.

    Attributes:
        magnitudes: λ of all terms, shape (N,), float64.
        indices: which terms u and v hold, ascending, shape (m,), int64.
        u: u' = √λ·u of these terms, shape (out, m), in the matrix's dtype.
        v: v' = √λ·v of these terms, shape (in, m), in the matrix's dtype.
        blocks: the number of blocks that u and v are stacked of.
    """

    magnitudes: Tensor
    indices: Tensor
    u: Tensor
    v: Tensor
    blocks: int = 1

    def compose(self) -> Tensor:
        """Return Σ u'ᵢ v'ᵢᵀ over the held terms, shape (out, in); blocks are stacked."""
        return compose(self.u, self.v, self.blocks)

    def cut(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of u', shape (out, n), and v', shape (in, n), of terms that it holds."""
        columns = self.columns(indices)
        return self.u.mT.index_select(0, columns).mT, self.v.mT.index_select(0, columns).mT  # one term per row

    def columns(self, indices: Tensor) -> Tensor:
        """Return the columns of u and v that hold these terms."""
        return torch.searchsorted(self.indices, indices)

    def keep(self, indices: Tensor) -> "Spectrum":
        """Return a spectrum with only these terms, in its own memory."""
        u, v = self.cut(indices)
        return replace(self, indices=indices, u=u, v=v)


def compose(u: Tensor, v: Tensor, blocks: int = 1) -> Tensor:
    """Return u vᵀ, shape (out, in), of every block."""
    if blocks == 1:
        return u @ v.mT
    return (u.unflatten(0, (blocks, -1)) @ v.unflatten(0, (blocks, -1)).mT).flatten(0, 1)


def _whole(name: str, spectrum: Spectrum) -> Spectrum:
    return spectrum


def decompose(
    matrices: Mapping[str, Tensor], keep: Callable[[str, Spectrum], Spectrum] = _whole
) -> dict[str, Spectrum]:
    """Decompose every matrix (out, in), or stack of blocks (blocks, out, in), each as one.

    A term of magnitude zero gets a unit u' and v' = 0: the matrix is unchanged, and the term can train (with both
    sides zero its gradients would be zero for ever).

    Args:
        matrices: by name.
        keep: returns what to keep of a spectrum, given its name; called before the next matrices are decomposed.

    Raises:
        UserError: a matrix that does not consist of real floating-point numbers, or has NaN or Inf.
    """
    for name, matrix in matrices.items():
        _check(f"layer {name}: its weight" if name else "the matrix", matrix)
    spectra: dict[str, Spectrum] = {}
    for names in _batches(matrices):
        spectra |= _decompose_together({name: matrices[name].detach() for name in names}, keep)
    return {name: spectra[name] for name in matrices}


def _batches(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the matrices that are decomposed together."""
    batches: dict[object, list[str]] = {}
    for name, matrix in matrices.items():
        alone = name if matrix.device.type == "cpu" else None
        batches.setdefault((alone, matrix.shape[-2:], matrix.dtype, matrix.device), []).append(name)
    return list(batches.values())


def _decompose_together(
    matrices: Mapping[str, Tensor], keep: Callable[[str, Spectrum], Spectrum]
) -> dict[str, Spectrum]:
    """Decompose matrices of one shape, dtype and device in one batched call."""
    stacks = [matrix if matrix.dim() == 3 else matrix[None] for matrix in matrices.values()]
    parts = _decompose_batch(torch.cat(stacks) if len(stacks) > 1 else stacks[0])
    each = zip(*(part.split([len(stack) for stack in stacks]) for part in parts), strict=True)
    return {name: keep(name, _joined(*its)) for name, its in zip(matrices, each, strict=True)}


def _joined(magnitudes: Tensor, u: Tensor, v: Tensor) -> Spectrum:
    """Return one spectrum of λ (blocks, N), u' (blocks, out, N) and v' (blocks, in, N)."""
    blocks, rank = magnitudes.shape
    joined = magnitudes[0] if blocks == 1 else magnitudes.square().sum(dim=0).sqrt()
    us, vs = (part[0] if blocks == 1 else torch.cat(part.mT.unbind(), dim=1).mT for part in (u, v))  # one term per row
    return Spectrum(joined, torch.arange(rank, device=u.device), us, vs, blocks)


def decompose_one(matrix: Tensor) -> Spectrum:
    """Decompose a single matrix (out, in)."""
    return decompose({"": matrix})[""]


def _check(what: str, matrix: Tensor) -> None:
    """Raise a `UserError` that says why a matrix has no singular terms to share."""
    if matrix.dim() not in (2, 3) or not matrix.is_floating_point():
        kind = f"{matrix.dtype} of shape {tuple(matrix.shape)}"
        raise UserError(f"{what} is {kind}; a matrix of real floating-point numbers is needed")
    if not bool(matrix.isfinite().all()):
        raise UserError(f"{what} has NaN or Inf; training diverged, so lower local.lr or the clip")


def _decompose_batch(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return magnitudes (B, N), u' (B, out, N) and v' (B, in, N) of a batch (B, out, in)."""
    wide = batch.shape[1] <= batch.shape[2]
    flat = batch if wide else batch.mT
    magnitudes, short, long = _gram_route(flat)
    if bool((magnitudes[:, -1] <= GRAM_FLOOR * magnitudes[:, 0]).any()):
        magnitudes, short, long = _svd_route(flat)
    return (magnitudes, short, long) if wide else (magnitudes, long, short)


def _gram_route(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return λ and the scaled factors of a batch (B, N, M), N ≤ M, none of whose λ is zero."""
    squares, left = torch.linalg.eigh(lower_gram(flat.double()))  # reads only the lower triangle
    magnitudes = squares.flip(-1).clamp(min=0).sqrt()
    left = left.flip(-1)
    root = magnitudes.sqrt()[:, :, None].clamp(min=torch.finfo(torch.float64).tiny)
    # Rows are terms, so that cutting terms out is copying rows. W's own precision is enough here.
    long = (left.mT / root).to(flat.dtype) @ flat
    return magnitudes, (left * root.mT).to(flat.dtype), long.mT


def lower_gram(flat: Tensor) -> Tensor:
    """Return AAᵀ (B, N, N) of a batch A (B, N, M), right in the lower triangle only: about half the work."""
    gram = flat.new_zeros(len(flat), flat.shape[1], flat.shape[1])
    for start in range(0, flat.shape[1], STRIP):
        rows, columns = slice(start, start + STRIP), slice(0, start + STRIP)
        if len(flat) == 1:  # a product of two matrices is faster than one of a batch of them
            torch.mm(flat[0, rows], flat[0, columns].mT, out=gram[0, rows, columns])
        else:
            gram[:, rows, columns] = flat[:, rows] @ flat[:, columns].mT
    return gram


def _svd_route(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for any batch; a λ of zero comes with a unit column on the short side and zeros on the long one."""
    left, magnitudes, right = torch.linalg.svd(flat.double(), full_matrices=False)
    # Terms below the numerical rank are rounding errors. They count as zero, so that no factors of 1e-9 are trained.
    noise = magnitudes[:, :1] * max(flat.shape[1:]) * torch.finfo(torch.float64).eps
    magnitudes = torch.where(magnitudes > noise, magnitudes, 0.0)  # LAPACK may return −0.0
    root = magnitudes.sqrt()[:, None, :]
    short = torch.where(root == 0, left, left * root)
    return magnitudes, short.to(flat.dtype), (right.mT * root).to(flat.dtype)
