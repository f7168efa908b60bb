"""A weight matrix as a sum of singular terms: W = Σ u'ᵢ v'ᵢᵀ with u'ᵢ = √λᵢ·uᵢ and v'ᵢ = √λᵢ·vᵢ.

The eigenvectors of the smaller Gram matrix, say WWᵀ, are one side of the singular vectors; the other side is Wᵀu/λ. In
float64 this is several times cheaper than an SVD. The recomposition is exact whatever the accuracy of λ, since UUᵀW =
W for any orthonormal U. But squaring costs small terms their orthogonality: if some λ is below 1e-5 of the largest, an
SVD is computed instead.

A weight of several blocks (a grouped convolution) has a spectrum for each. Its term i is the i-th term of every block
at once, with the blocks' u' stacked, and their v' as well: these terms are orthogonal too, and λ² of one is the sum of
its blocks' λ².

On a GPU, matrices of one shape are decomposed in one batched call. On a CPU every matrix is decomposed by one thread,
and as many threads as torch may use work side by side: no core waits for another within a matrix, and the result is the
same whatever their number.

All terms of a square matrix take twice as many numbers as the matrix, and a round needs only those that somebody draws.
So `decompose` passes the magnitudes to a function that chooses terms, and keeps only the vectors of these.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding.errors import UserError

# Below this share of the largest magnitude, squaring in float64 leaves fewer digits than float32 holds.
GRAM_FLOOR = 1e-5
STRIP = 128  # rows of a Gram matrix computed at once

Choose = Callable[[str, Tensor], Tensor]  # of a matrix's name and all its λ (N,): which terms to keep, ascending


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

    def cut(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of u', shape (out, n), and v', shape (in, n), of terms that it holds."""
        columns = self.columns(indices)
        return self.u.mT.index_select(0, columns).mT, self.v.mT.index_select(0, columns).mT  # one term per row

    def columns(self, indices: Tensor) -> Tensor:
        """Return the columns of u and v that hold these terms."""
        return torch.searchsorted(self.indices, indices)


def compose(u: Tensor, v: Tensor, blocks: int = 1) -> Tensor:
    """Return u vᵀ, shape (out, in), of every block."""
    if blocks == 1:
        return u @ v.mT
    return (u.unflatten(0, (blocks, -1)) @ v.unflatten(0, (blocks, -1)).mT).flatten(0, 1)


def _all(name: str, magnitudes: Tensor) -> Tensor:
    return torch.arange(len(magnitudes))


def decompose(matrices: Mapping[str, Tensor], choose: Choose = _all) -> dict[str, Spectrum]:
    """Decompose every matrix (out, in), or stack of blocks (blocks, out, in), each as one.

    A term of magnitude zero gets a unit u' and v' = 0: the matrix is unchanged, and the term can train (with both
    sides zero its gradients would be zero for ever).

    Args:
        matrices: by name.
        choose: which terms to keep; on a CPU, several threads call it.

    Raises:
        UserError: a matrix that does not consist of real floating-point numbers, or has NaN or Inf.
    """
    for name, matrix in matrices.items():
        _check(f"layer {name}: its weight" if name else "the matrix", matrix)
    batches = sorted(_batches(matrices), key=lambda names: -matrices[names[0]].numel())  # most work and memory first

    def spectra_of(names: list[str]) -> dict[str, Spectrum]:
        return _decompose_together({name: matrices[name].detach() for name in names}, choose)

    spectra = {name: spectrum for found in _side_by_side(spectra_of, batches) for name, spectrum in found.items()}
    return {name: spectra[name] for name in matrices}


def _batches(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the matrices that are decomposed together."""
    batches: dict[object, list[str]] = {}
    for name, matrix in matrices.items():
        alone = name if matrix.device.type == "cpu" else None
        batches.setdefault((alone, matrix.shape[-2:], matrix.dtype, matrix.device), []).append(name)
    return list(batches.values())


def _side_by_side(
    spectra_of: Callable[[list[str]], dict[str, Spectrum]], batches: list[list[str]]
) -> Iterator[dict[str, Spectrum]]:
    """Yield the spectra of every batch, from as many threads as torch may use, each computing with one."""
    threads = torch.get_num_threads()
    if min(threads, len(batches)) < 2:
        yield from map(spectra_of, batches)
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(spectra_of, batches)
    finally:
        torch.set_num_threads(threads)


def _decompose_together(matrices: Mapping[str, Tensor], choose: Choose) -> dict[str, Spectrum]:
    """Decompose matrices of one shape, dtype and device in one batched call."""
    stacks = [matrix if matrix.dim() == 3 else matrix[None] for matrix in matrices.values()]
    batch = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
    wide = batch.shape[1] <= batch.shape[2]
    flat = batch if wide else batch.mT
    factors = _factors(flat)
    each = zip(*(part.split([len(stack) for stack in stacks]) for part in (flat, *factors)), strict=True)
    spectra = {}
    for name, (its, magnitudes, *vectors) in zip(matrices, each, strict=True):
        joined = magnitudes[0] if len(its) == 1 else magnitudes.square().sum(dim=0).sqrt()
        indices = choose(name, joined).to(joined.device)
        with torch.autocast(its.device.type, enabled=False):  # in half precision every round would move the weights
            short, long = _sides(its, indices, magnitudes, *vectors)
        spectra[name] = Spectrum(joined, indices, *((short, long) if wide else (long, short)), len(its))
    return spectra


def _check(what: str, matrix: Tensor) -> None:
    """Raise a `UserError` that says why a matrix has no singular terms to share."""
    if matrix.dim() not in (2, 3) or not matrix.is_floating_point():
        kind = f"{matrix.dtype} of shape {tuple(matrix.shape)}"
        raise UserError(f"{what} is {kind}; a matrix of real floating-point numbers is needed")
    if not bool(matrix.isfinite().all()):
        raise UserError(f"{what} has NaN or Inf; training diverged, so lower local.lr or the clip")


def _factors(flat: Tensor) -> tuple[Tensor, ...]:
    """Return λ (B, N) and the vectors, one per row, of a batch (B, N, M), N ≤ M.

    These are the short side's (B, N, N), and the long side's (B, N, M) only where they are not Wᵀu/λ.
    """
    squares, left = torch.linalg.eigh(lower_gram(flat.double()))  # reads only the lower triangle
    magnitudes = squares.flip(-1).clamp(min=0).sqrt()
    if bool((magnitudes[:, -1] > GRAM_FLOOR * magnitudes[:, 0]).all()):
        return magnitudes, left.mT.flip(-2)
    left, magnitudes, right = torch.linalg.svd(flat.double(), full_matrices=False)
    # Terms below the numerical rank are rounding errors. They count as zero, so that no factors of 1e-9 are trained.
    noise = magnitudes[:, :1] * max(flat.shape[1:]) * torch.finfo(torch.float64).eps
    return torch.where(magnitudes > noise, magnitudes, 0.0), left.mT, right  # LAPACK may return −0.0


def _sides(
    flat: Tensor, indices: Tensor, magnitudes: Tensor, left: Tensor, right: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return √λ times the unit vectors of these terms, the short side's (B·N, n) and the long side's (B·M, n).

    A λ of zero comes with a unit column on the short side and zeros on the long one.

    Args:
        flat: the matrices, shape (B, N, M).
        indices: of the terms, shape (n,).
        magnitudes: λ, shape (B, N).
        left: the short side's vectors, one per row, shape (B, N, N).
        right: the long side's vectors, one per row, shape (B, N, M); where None, they are Wᵀu/λ, in W's own precision.
    """
    root = magnitudes.sqrt()[:, :, None]
    if right is None:  # a product of few rows rounds in another way: a term would depend on which others are drawn
        long = ((left / root).to(flat.dtype) @ flat)[:, indices]
    else:
        long = (right[:, indices] * root[:, indices]).to(flat.dtype)
    left, root = left[:, indices], root[:, indices]
    short = torch.where(root == 0, left, left * root).to(flat.dtype)
    # The blocks of a vector are stacked; one term per row of memory, so that cutting terms copies rows.
    return short.transpose(0, 1).flatten(1).mT, long.transpose(0, 1).flatten(1).mT


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
