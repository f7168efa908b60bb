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
So a function chooses by the magnitudes of all terms, and the vectors of those that it chooses are computed.
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
Choose = Callable[[Tensor], Tensor]  # λ of all terms of a matrix -> which of them get vectors, ascending, int64

# Below this share of the largest magnitude, squaring in float64 leaves fewer digits than float32 holds.
GRAM_FLOOR = 1e-5
STRIP = 128  # rows of a Gram matrix computed at once
MOVED_STRIP = 256  # rows of a weight that move at once: in float64 a whole layer is twice its size


@dataclass(frozen=True)
class Spectrum:
    """Singular terms of one matrix, by non-increasing magnitude: all N = min(out, in), or those that are kept.

    Attributes:
        magnitudes: λ of all terms, shape (N,), float64.
        indices: the numbers of the terms that u and v hold, ascending, shape (m,), int64.
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

    def changes(self, u: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return the change of the ``weight``, shape (out, in), if these terms move to ū and v̄, in its dtype.

        It is Σ (ū v̄ᵀ − u' v'ᵀ) = (ū − u') v̄ᵀ + u' (v̄ − v')ᵀ, in float64, computed a strip of rows at a time; zero where
        no vector has moved.

        Args:
            u: ū, in the form of u, float64.
            v: v̄ likewise.
        """
        new_u, old_u = (side.unflatten(0, (self.blocks, -1)) for side in (u, self.u))
        _, rows, _ = old_u.shape
        change, v_change = old_u.new_empty(self.blocks, rows, len(v) // self.blocks), v - self.v
        for start in range(0, rows, MOVED_STRIP):
            strip = slice(start, start + MOVED_STRIP)
            before = old_u[:, strip].flatten(0, 1).double()
            moved = compose(new_u[:, strip].flatten(0, 1) - before, v, self.blocks)
            moved += compose(before, v_change, self.blocks)
            change[:, strip] = moved.view_as(change[:, strip])
        return {"weight": change.flatten(0, 1)}


def compose(u: Tensor, v: Tensor, blocks: int = 1) -> Tensor:
    """Return u vᵀ, shape (out, in), of every block."""
    if blocks == 1:
        return u @ v.mT
    return (u.unflatten(0, (blocks, -1)) @ v.unflatten(0, (blocks, -1)).mT).flatten(0, 1)


def all_terms(magnitudes: Tensor) -> Tensor:
    """Choose all terms."""
    return torch.arange(len(magnitudes), device=magnitudes.device)


def decompose(matrices: Mapping[str, Tensor]) -> dict[str, Spectrum]:
    """Decompose every matrix (out, in), or stack of blocks (blocks, out, in), into all of its terms.

    Raise a UserError for a matrix that does not consist of real floating-point numbers, or has NaN or Inf.
    """
    check_matrices(matrices.items())

    def of_batch(names: list[str]) -> list[Spectrum]:
        return decompose_batch([matrices[name] for name in names], [all_terms] * len(names))

    return map_batches(of_batch, matrices)


def largest_terms(matrix: Tensor, num_terms: int) -> tuple[Tensor, Tensor]:
    """Return u' and v' of the largest terms of a matrix, or of every block, stacked, in the matrix's dtype.

    Args:
        matrix: the matrix or matrices, shape (out, in) or (blocks, out, in).
        num_terms: n, of each block.

    Returns:
        u' (blocks·out, n) and v' (blocks·in, n), by non-increasing magnitude.
    """
    check_matrices([("", matrix)])
    (spectrum,) = decompose_batch([matrix], [lambda magnitudes: torch.arange(num_terms, device=magnitudes.device)])
    return spectrum.u, spectrum.v


def map_batches(function: Callable[[list[str]], Sequence[Result]], matrices: Mapping[str, Tensor]) -> dict[str, Result]:
    """Map a function of several names over batches of matrices that one call decomposes; return its results by name.

    On a CPU every matrix is alone. The batches with the most work and memory are the first.
    """
    batches: dict[object, list[str]] = {}
    for name, matrix in matrices.items():
        alone = name if matrix.device.type == "cpu" else None
        batches.setdefault((alone, matrix.shape[-2:], matrix.dtype, matrix.device), []).append(name)
    ordered = sorted(batches.values(), key=lambda names: -matrices[names[0]].numel())
    mapped = map_threads(function, ordered, {matrix.device for matrix in matrices.values()})
    results = {
        name: result
        for names, of_names in zip(ordered, mapped, strict=True)
        for name, result in zip(names, of_names, strict=True)
    }
    return {name: results[name] for name in matrices}


def map_threads(
    function: Callable[[Item], Result], items: Sequence[Item], devices: Iterable[torch.device]
) -> Iterable[Result]:
    """Map a function over items on as many threads as torch may use, each computing with one; keep the order.

    Threads serve the CPU only. Another device is kept busy by one, and several that call `torch.linalg` there first, at
    the same time, fail. Each thread sets its number to one itself: linear algebra in a new thread does not follow
    torch's.
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


def decompose_batch(matrices: Sequence[Tensor], choices: Sequence[Choose]) -> list[Spectrum]:
    """Decompose matrices of one shape, dtype and device in one batched call.

    A term of magnitude zero gets a unit u' and v' = 0: the matrix is unchanged, and the term can train (with both sides
    zero its gradients would be zero for ever).

    Args:
        matrices: each of shape (out, in) or (blocks, out, in).
        choices: the function that chooses the terms, of each matrix.
    """
    stacks = [matrix.detach() if matrix.dim() == 3 else matrix.detach()[None] for matrix in matrices]
    batch = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
    wide = batch.shape[1] <= batch.shape[2]
    flat = batch if wide else batch.mT
    magnitudes, left, right = _factors(flat)
    sizes = [len(stack) for stack in stacks]
    rights = [None] * len(sizes) if right is None else right.split(sizes)
    spectra = []
    for choose, blocks, each, short, long in zip(
        choices, flat.split(sizes), magnitudes.split(sizes), left.split(sizes), rights, strict=True
    ):
        joined = join_blocks(each)
        indices = choose(joined).to(joined.device)
        with torch.autocast(joined.device.type, enabled=False):  # in half precision every round would move the weights
            sides = _sides(blocks, indices, each, short, long)
        u, v = sides if wide else sides[::-1]
        spectra.append(Spectrum(joined, indices, u, v, len(blocks)))
    return spectra


def join_blocks(magnitudes: Tensor) -> Tensor:
    """Return the magnitudes (N,) of terms of several blocks, from those of each block (blocks, N)."""
    return magnitudes[0] if len(magnitudes) == 1 else magnitudes.square().sum(dim=0).sqrt()


def check_matrices(matrices: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a UserError for a matrix that does not consist of real floating-point numbers, or has NaN or Inf.

    The matrices, each with the name of its layer, or none, are read one after the other.
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
        indices: the numbers of the terms, shape (n,).
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
