"""Truncate a weight so that the layer's outputs change least.

Among all L of rank n, W − L is smallest in the mean of ‖(W − L)x‖² over the layer's inputs x for L = PPᵀW, where P are
the n leading eigenvectors of W·S·Wᵀ, S = E[xxᵀ]. That is the truncated SVD of W·S^½ times S^-½, as in SVD-LLM (Wang et
al., ICLR 2025), but S need not be inverted. W·S·Wᵀ is also the second moment of the outputs y = Wx: P are the outputs'
principal components. So moments of outputs suffice, which for a convolution are those of all positions, whatever its
stride, padding and dilation.

A little of W·Wᵀ is added to W·S·Wᵀ. It decides among terms that the activations do not tell apart, as where fewer
samples than terms were seen. Without any activations, L is the truncated SVD of W.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 1e-6  # the share of W·Wᵀ


@dataclass
class Moment:
    """The sum of zzᵀ over a layer's activations z: its inputs, or its outputs without the bias.

    Attributes:
        sums: shape (blocks, width, width), float64; a grouped convolution has a block for each group.
        of_inputs: whether z are the inputs.
        transposed: whether the rows of the layer's matrix are its inputs.
    """

    sums: Tensor
    of_inputs: bool
    transposed: bool

    def add(self, activations: Tensor) -> None:
        """Add activations, shape (…, blocks · width)."""
        blocks, width, _ = self.sums.shape
        rows = activations.detach().reshape(-1, blocks, width).double().movedim(1, 0)
        self.sums.baddbmm_(rows.mT, rows)


def weighted_terms(blocks: Tensor, num_terms: int, moment: Moment) -> tuple[Tensor, Tensor]:
    """Return u' and v' of the L of rank n that changes the outputs least, for every block, stacked.

    Args:
        blocks: W, shape (blocks, rows, columns).
        num_terms: n.
        moment: the moment of the layer's activations.

    Returns:
        u' (blocks·rows, n) and v' (blocks·columns, n), the singular terms of L, in the dtype of `blocks`.
    """
    maps = (blocks.mT if moment.transposed else blocks).double()  # from inputs to outputs
    basis, core = None, maps
    gram = moment.sums
    if moment.of_inputs:
        if maps.shape[1] > maps.shape[2]:
            basis, core = torch.linalg.qr(maps)
        gram = core @ gram @ core.mT
    plain = core @ core.mT
    total = _trace(gram)
    gram = gram * (1 - DAMPING) + plain * (total / _trace(plain).clamp(min=torch.finfo(torch.float64).tiny)) * DAMPING
    leading = torch.linalg.eigh(torch.where(total > 0, gram, plain)).eigenvectors[..., -num_terms:]
    outputs = leading if basis is None else basis @ leading
    right, magnitudes, left = torch.linalg.svd(maps.mT @ outputs, full_matrices=False)  # of L = P(WᵀP)ᵀ
    sides = right, outputs @ left.mT
    root = magnitudes.sqrt()[:, None]
    u, v = sides if moment.transposed else reversed(sides)
    u, v = u * root.where(root > 0, 1.0), v * root  # a term of magnitude zero can train: its u' is not zero
    return u.flatten(0, 1).to(blocks.dtype), v.flatten(0, 1).to(blocks.dtype)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
