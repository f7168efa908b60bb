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
So a `Decomposition` has the magnitudes of all terms, and computes the vectors of those that you `keep`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sharding.errors import UserError
from sharding.matrices.values import first_flagged

Item = TypeVar("Item")
Result = TypeVar("Result")

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


@dataclass(frozen=True)
class Decomposition:
    """All magnitudes of one matrix, and what the vectors of its terms are computed from.

    Attributes:
        magnitudes: λ of all terms, shape (N,), non-increasing, float64.
        flat: the matrix's blocks, shape (blocks, N, M) with N ≤ M.
        block_magnitudes: λ of each block, shape (blocks, N).
        left: the short side's unit vectors, one per row, shape (blocks, N, N).
        right: the long side's, shape (blocks, N, M); where None, they are Wᵀu/λ.
        wide: whether the short side is that of the outputs.
    """

    magnitudes: Tensor
    flat: Tensor
    block_magnitudes: Tensor
    left: Tensor
    right: Tensor | None
    wide: bool

    def keep(self, indices: Tensor | None = None) -> Spectrum:
        """Return the spectrum with the vectors of these terms.

        A term of magnitude zero gets a unit u' and v' = 0: the matrix is unchanged, and the term can train (with both
        sides zero its gradients would be zero for ever).

        Args:
            indices: ascending, shape (n,); all terms by default.
        """
        device = self.magnitudes.device
        indices = torch.arange(len(self.magnitudes), device=device) if indices is None else indices.to(device)
        with torch.autocast(device.type, enabled=False):  # in half precision every round would move the weights
            short, long = _sides(self.flat, indices, self.block_magnitudes, self.left, self.right)
        u, v = (short, long) if self.wide else (long, short)
        return Spectrum(self.magnitudes, indices, u, v, len(self.flat))


def decompose(matrices: Mapping[str, Tensor]) -> dict[str, Spectrum]:
    """Decompose every matrix (out, in), or stack of blocks (blocks, out, in), into all of its terms.

    Raises:
        UserError: a matrix that does not consist of real floating-point numbers, or has NaN or Inf.
    """
    check_matrices(matrices.items())

    def spectra_of(names: list[str]) -> list[Spectrum]:
        return [decomposition.keep() for decomposition in decompose_batch([matrices[name] for name in names])]

    batches, devices = group_by_shape(matrices), {matrix.device for matrix in matrices.values()}
    spectra = {
        name: spectrum
        for names, results in zip(batches, map_threads(spectra_of, batches, devices), strict=True)
        for name, spectrum in zip(names, results, strict=True)
    }
    return {name: spectra[name] for name in matrices}


def largest_terms(matrix: Tensor, num_terms: int) -> tuple[Tensor, Tensor]:
    """Return u' and v' of the largest terms of a matrix, or of every block, stacked, in the matrix's dtype.

    Args:
        matrix: shape (out, in) or (blocks, out, in).
        num_terms: n, of each block.

    Returns:
        u' (blocks·out, n) and v' (blocks·in, n), by non-increasing magnitude.
    """
    check_matrices([("", matrix)])
    spectrum = decompose_batch([matrix])[0].keep(torch.arange(num_terms, device=matrix.device))
    return spectrum.u, spectrum.v


def group_by_shape(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the matrices that one batched call decomposes, the most work and memory first.

    On a CPU every matrix is alone.
    """
    batches: dict[object, list[str]] = {}
    for name, matrix in matrices.items():
        alone = name if matrix.device.type == "cpu" else None
        batches.setdefault((alone, matrix.shape[-2:], matrix.dtype, matrix.device), []).append(name)
    return sorted(batches.values(), key=lambda names: -matrices[names[0]].numel())


def map_threads(
    function: Callable[[Item], Result], items: Sequence[Item], devices: Iterable[torch.device]
) -> Iterable[Result]:
    """Map a function over items on as many threads as torch may use, each computing with one; keep the order.

    Threads serve the CPU only. Another device is kept busy by one, and several that call `torch.linalg` there first, at
    the same time, fail. Each thread sets its number to one itself: linear algebra in a new thread does not follow
    torch's.

    Args:
        function: of an item.
        items: in order.
        devices: that the function computes on.
    """
    threads = torch.get_num_threads()
    if threads == 1 or any(device.type != "cpu" for device in devices):
        yield from map(function, items)
        return
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(function, items)
    finally:
        torch.set_num_threads(threads)  # the number of a thread that starts later is the last that was set


def decompose_batch(matrices: Sequence[Tensor]) -> list[Decomposition]:
    """Decompose matrices of one shape, dtype and device in one batched call."""
    stacks = [matrix.detach() if matrix.dim() == 3 else matrix.detach()[None] for matrix in matrices]
    batch = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
    wide = batch.shape[1] <= batch.shape[2]
    flat = batch if wide else batch.mT
    magnitudes, left, right = _factors(flat)
    sizes = [len(stack) for stack in stacks]
    rights = [None] * len(sizes) if right is None else right.split(sizes)
    decompositions = []
    for blocks, each, short, long in zip(
        flat.split(sizes), magnitudes.split(sizes), left.split(sizes), rights, strict=True
    ):
        joined = each[0] if len(each) == 1 else each.square().sum(dim=0).sqrt()
        decompositions.append(Decomposition(joined, blocks, each, short, long, wide))
    return decompositions


def check_matrices(matrices: Iterable[tuple[str, Tensor]]) -> None:
    """Check that matrices have singular terms to share.

    Args:
        matrices: each with the name of its layer, or none; read one after the other.

    Raises:
        UserError: a matrix that does not consist of real floating-point numbers, or has NaN or Inf.
    """
    spoiled = []
    for name, matrix in matrices:
        if matrix.dim() not in (2, 3) or not matrix.is_floating_point():
            kind = f"{matrix.dtype} of shape {tuple(matrix.shape)}"
            raise UserError(f"{_described(name)} is {kind}; a matrix of real floating-point numbers is needed")
        spoiled.append((name, ~matrix.isfinite().all()))
    if (found := first_flagged(spoiled)) is not None:
        reason = "training diverged, so lower the learning rate or the clip"
        raise UserError(f"{_described(found)} has NaN or Inf; {reason}")


def _described(name: str) -> str:
    return f"layer {name}: its weight" if name else "the matrix"


def _factors(flat: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return λ (B, N), and the unit vectors of the short and the long side, one per row, of a batch (B, N, M), N ≤ M.

    The long side's are None where they are Wᵀu/λ.
    """
    squares, left = torch.linalg.eigh(lower_gram(flat.double()))  # reads only the lower triangle
    magnitudes = squares.flip(-1).clamp(min=0).sqrt()
    if bool((magnitudes[:, -1] > GRAM_FLOOR * magnitudes[:, 0]).all()):
        return magnitudes, left.mT.flip(-2), None
    left, magnitudes, right = torch.linalg.svd(flat.double(), full_matrices=False)
    # Terms below the numerical rank are rounding errors, of the stored matrix or of the SVD. They count as zero, so
    # that no factors of 1e-4 or 1e-9 are trained.
    stored = 8 * torch.finfo(torch.float64 if flat.dtype == torch.float64 else torch.float32).eps
    noise = magnitudes[:, :1] * max(stored, max(flat.shape[1:]) * torch.finfo(torch.float64).eps)
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
