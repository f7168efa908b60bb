"""The singular terms of a product L = A·Bᵀ of few columns, without the product.

With the SVD A = PSWᵀ, B = QR and the SVD of the small core, SWᵀRᵀ = XΣYᵀ, the singular vectors are PX and QY. So the
terms are the factors in another basis: u' = A·G and v' = B·G⁻ᵀ, with G = WS⁻¹XΣ^½. Neither the product nor P and Q are
computed. All is in float64.

The basis leads back, too. If the terms move to ū and v̄, the factors A + (ū − u')G⁻¹ and B + (v̄ − v')Gᵀ have the product
Σ ū v̄ᵀ. So the rank stays, and the factors keep their basis from round to round, as an optimizer of them needs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sharding.matrices.spectrum import Choose, Spectrum, all_terms, join_blocks


@dataclass(frozen=True, kw_only=True)
class ProductSpectrum(Spectrum):
    """Singular terms of a product of factors, and the way back to the factors.

    Attributes:
        basis: the columns of G that belong to u and v, shape (blocks, n, m), float64.
        inverse: the rows of G⁻¹ likewise, shape (blocks, m, n), float64.
    """

    basis: Tensor
    inverse: Tensor

    def changes(self, u: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return the changes of A, as ``u``, and of B, as ``v``, that move these terms to ū and v̄ (float64)."""
        u_change, v_change = (
            (new - old.double()).unflatten(0, (self.blocks, -1)) for new, old in ((u, self.u), (v, self.v))
        )
        a, b = u_change @ self.inverse, v_change @ self.basis.mT
        return {"u": a.flatten(0, 1).to(self.u.dtype), "v": b.flatten(0, 1).to(self.v.dtype)}


def decompose_product(a: Tensor, b: Tensor, choose: Choose = all_terms) -> ProductSpectrum:
    """Decompose A·Bᵀ, or a stack of such products as one matrix of several blocks.

    A term of magnitude zero keeps a side that is not zero, if A or B has one, so that it can train.

    Args:
        a: A, shape (blocks, rows, n), rows ≥ n.
        b: B, shape (blocks, columns, n), columns ≥ n.
        choose: chooses the terms that get vectors.
    """
    a, b = a.detach(), b.detach()
    left, right = (torch.linalg.qr(factor.double(), mode="r").R for factor in (a, b))
    _, sizes, w = torch.linalg.svd(left)  # w is Wᵀ
    x, magnitudes, _ = torch.linalg.svd(sizes[:, :, None] * w @ right.mT)
    noise = sizes[:, :1] * max(a.shape[1], b.shape[1]) * torch.finfo(torch.float64).eps
    magnitudes = magnitudes.where(magnitudes > noise * torch.linalg.matrix_norm(right)[:, None], 0.0)
    scale = magnitudes.sqrt().where(magnitudes > 0, 1.0)[:, None]
    # Any invertible matrix in the place of S leads there and back. Where A has no direction, 1 leaves B's as it is.
    sizes = sizes.where(sizes > noise, 1.0)[:, None]
    basis = w.mT / sizes @ (x * scale)
    inverse = (x / scale).mT * sizes @ w
    joined = join_blocks(magnitudes)
    indices = choose(joined).to(joined.device)
    sides = []
    for factor, to_terms in ((a, basis), (b, inverse.mT)):
        # Of all terms, since a product of fewer columns rounds in another way: a term would depend on the others.
        terms = (to_terms.mT @ factor.double().mT).to(factor.dtype)[:, indices]
        sides.append(terms.transpose(0, 1).flatten(1).mT)  # one term per row of memory, so that cutting copies rows
    u, v = sides
    return ProductSpectrum(
        magnitudes=joined,
        indices=indices,
        u=u,
        v=v,
        blocks=len(a),
        basis=basis[..., indices],
        inverse=inverse[:, indices],
    )
