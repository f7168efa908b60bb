"""The singular terms of a product A·Bᵀ of few columns, without the product.

With A = QᴬRᴬ, B = QᴮRᴮ and the SVD of the small core, RᴬRᴮᵀ = XΣYᵀ, the singular vectors are QᴬX and QᴮY. All is
computed in float64.
"""

import torch
from torch import Tensor


def product_terms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return λ, u' and v' of every A·Bᵀ, by non-increasing magnitude.

    A term of magnitude zero gets a unit u' and v' = 0, as in `sharding.svd.spectrum.decompose`.

    Args:
        a: A, shape (blocks, rows, n).
        b: B, shape (blocks, columns, n).

    Returns:
        λ (blocks, n), u' (blocks, rows, n) and v' (blocks, columns, n), float64.
    """
    (left, left_core), (right, right_core) = torch.linalg.qr(a.double()), torch.linalg.qr(b.double())
    x, magnitudes, y = torch.linalg.svd(left_core @ right_core.mT)
    noise = magnitudes[:, :1] * max(a.shape[1], b.shape[1]) * torch.finfo(torch.float64).eps
    magnitudes = magnitudes.where(magnitudes > noise, 0.0)
    root = magnitudes.sqrt()[:, None]
    return magnitudes, left @ (x * root.where(root > 0, 1.0)), right @ (y.mT * root)
