"""How federated methods of LoRA average a layer's factors.

LoRA adds B·A to a frozen weight (Hu et al., ICLR 2022). Here u = B has shape (out, n) and v = Aᵀ has shape (in, n), as
in a factorized layer, and n differs between clients. The scale α/n of LoRA is 1.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Factors = tuple[Tensor, Tensor]
Weights = Sequence[float]  # D_c/ΣD
Aggregate = Callable[[Sequence[Factors], Weights], Factors]


def fedit(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Average B and A separately; all clients have the same rank (Zhang et al., ICASSP 2024, arXiv 2305.05644)."""
    scale = torch.tensor(weights, dtype=torch.float64)
    u, v = (torch.einsum("k,kij->ij", scale, torch.stack(sides).double()) for sides in _sides(updates))
    return u, v


def hetlora(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Pad B and A with zeros to the largest rank, and average them with weights ‖BA‖/Σ‖BA‖.

    Cho et al., EMNLP 2024 (arXiv 2401.06432), with zero-padding and sparsity-weighted aggregation; without pruning of
    ranks. The clients' samples do not count.
    """
    norms = [torch.linalg.matrix_norm(u @ v.mT) for u, v in updates]
    shares = [float(norm / sum(norms)) for norm in norms]
    rank = max(u.shape[1] for u, _ in updates)
    padded = [tuple(F.pad(side, (0, rank - side.shape[1])) for side in factors) for factors in updates]
    return fedit([(u, v) for u, v in padded], shares)


def flexlora(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Average the products BA, and return UΣ and V of the average's SVD (Bai et al., NeurIPS 2024, arXiv 2402.11505).

    A client of rank n receives the first n columns of both.
    """
    (u_basis, u_core), (v_basis, v_core) = (torch.linalg.qr(side) for side in flora(updates, weights))
    left, magnitudes, right = torch.linalg.svd(u_core @ v_core.mT, full_matrices=False)
    return u_basis @ left * magnitudes, v_basis @ right.mT


def flora(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Stack the clients' factors, so that their product is the average of BA.

    Wang et al., NeurIPS 2024 (arXiv 2409.05976).
    """
    us, vs = _sides(updates)
    return torch.cat([weight * u for weight, u in zip(weights, us, strict=True)], dim=1), torch.cat(vs, dim=1)


def _sides(updates: Sequence[Factors]) -> tuple[list[Tensor], list[Tensor]]:
    return [u for u, _ in updates], [v for _, v in updates]
