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

from sharding.matrices.spectrum import Spectrum


@dataclass(frozen=True, kw_only=True)
class ProductSpectrum(Spectrum):
    """Singular terms of a product of factors, and the way back to the factors.

    Attributes:
        basis: the columns of G that belong to u and v, shape (blocks, n, m), float64.
        inverse: the rows of G⁻¹ likewise, shape (blocks, m, n), float64.
    """

    basis: Tensor
    inverse: Tensor

    def factor_changes(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changes of A and B, in their form and dtype, that move these terms to ū and v̄ (float64)."""
        u_change, v_change = (
            (new - old.double()).unflatten(0, (self.blocks, -1)) for new, old in ((u, self.u), (v, self.v))
        )
        a, b = u_change @ self.inverse, v_change @ self.basis.mT
        return a.flatten(0, 1).to(self.u.dtype), b.flatten(0, 1).to(self.v.dtype)


@dataclass(frozen=True)
class ProductDecomposition:
    """All magnitudes of a product of factors, and the terms' basis.

    Attributes:
        magnitudes: λ of all terms, shape (n,), non-increasing, float64.
        a: A, shape (blocks, rows, n).
        b: B, shape (blocks, columns, n).
        basis: G, shape (blocks, n, n), float64.
        inverse: G⁻¹.
    """

    magnitudes: Tensor
    a: Tensor
    b: Tensor
    basis: Tensor
    inverse: Tensor

    def keep(self, indices: Tensor | None = None) -> ProductSpectrum:
        """Return the spectrum with the vectors of these terms (ascending, shape (m,)); of all by default.

        All are computed, since a product of fewer columns rounds in another way: a term would depend on the others.
        """
        device = self.magnitudes.device
        indices = torch.arange(len(self.magnitudes), device=device) if indices is None else indices.to(device)
        sides = []
        for factor, basis in ((self.a, self.basis), (self.b, self.inverse.mT)):
            terms = (basis.mT @ factor.double().mT).to(factor.dtype)[:, indices]
            sides.append(terms.transpose(0, 1).flatten(1).mT)  # one term per row of memory, so that cutting copies rows
        u, v = sides
        return ProductSpectrum(
            magnitudes=self.magnitudes,
            indices=indices,
            u=u,
            v=v,
            blocks=len(self.a),
            basis=self.basis[..., indices],
            inverse=self.inverse[:, indices],
        )


def decompose_product(a: Tensor, b: Tensor) -> ProductDecomposition:
    """Decompose A·Bᵀ, or a stack of such products as one matrix of several blocks.

    A term of magnitude zero keeps a side that is not zero, if A or B has one, so that it can train.

    Args:
        a: A, shape (blocks, rows, n), rows ≥ n.
        b: B, shape (blocks, columns, n), columns ≥ n.
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
    joined = magnitudes[0] if len(a) == 1 else magnitudes.square().sum(dim=0).sqrt()
    return ProductDecomposition(joined, a, b, basis, inverse)
