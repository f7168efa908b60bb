"""How federated methods of LoRA average a layer's factors.

LoRA adds B·A to a frozen weight (Hu et al., ICLR 2022). Here u = B has shape (out, n) and v = Aᵀ has shape (in, n), as
in a factorized layer, and n differs between clients. LoRA multiplies the product by a scale α/n. Here it is 1 for all
methods, as in FedIT's code; in FLoRA's code it is 2 for all ranks, and in FlexLoRA's 16/n.

Sources are the authors' repositories, read at the commits named below, and of HetLoRA, which has none, a figure of the
paper. `docs/results/finetune_plan.md` lists what differs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Factors = tuple[Tensor, Tensor]
Weights = Sequence[float]  # D_c/ΣD
Aggregate = Callable[[Sequence[Factors], Weights], Factors]


def fedit(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Average B and A separately, by samples; all clients have the same rank.

    Zhang et al., ICASSP 2024 (arXiv 2305.05644); `FedAvg` in `fed_utils/model_aggregation.py` of
    JayZhang42/FederatedGPT-Shepherd, commit bcffa00.
    """
    scale = torch.tensor(weights, dtype=torch.float64)
    u, v = (torch.einsum("k,kij->ij", scale, torch.stack(sides).double()) for sides in _sides(updates))
    return u, v


def hetlora(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Pad B and A with zeros to the largest rank, and average them with weights ‖BA‖/Σ‖BA‖, Frobenius norms.

    Cho et al., EMNLP 2024 (arXiv 2401.06432), figure 2: zero-padding, sparsity-weighted aggregation and truncation. The
    clients' samples do not count. The figure has one matrix, so each layer has weights from its norms here. The
    regularizer and the pruning of ranks on clients are left out. The zero-padding in the code of FLoRA and FlexLoRA
    is another method: it averages by samples.
    """
    norms = [torch.linalg.matrix_norm(u @ v.mT) for u, v in updates]
    shares = [float(norm / sum(norms)) for norm in norms]
    rank = max(u.shape[1] for u, _ in updates)
    padded = [tuple(F.pad(side, (0, rank - side.shape[1])) for side in factors) for factors in updates]
    return fedit([(u, v) for u, v in padded], shares)


def flexlora(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Average the products BA by samples, and return UΣ and V of the average's SVD.

    A client of rank n receives the first n columns of both. Bai et al., NeurIPS 2024 (arXiv 2402.11505); `FlexLoRA` in
    `fed_utils/model_aggregation.py` and `distribute_weight_fast` in `fed_utils/adaptive_peft.py` of
    alibaba/FederatedScope, branch FlexLoRA, commit 1cb1ab7. The products have rank Σn at most, and so many columns
    are returned; the code, with an SVD of all, has more, which are zero in B.
    """
    (u_basis, u_core), (v_basis, v_core) = (torch.linalg.qr(side) for side in flora(updates, weights))
    left, magnitudes, right = torch.linalg.svd(u_core @ v_core.mT, full_matrices=False)
    return u_basis @ left * magnitudes, v_basis @ right.mT


def flora(updates: Sequence[Factors], weights: Weights) -> Factors:
    """Stack the clients' factors, A multiplied by the clients' weights, so that their product is the average of BA.

    Wang et al., NeurIPS 2024 (arXiv 2409.05976); `FedAvg` with ``stacking`` in `fed_utils/model_aggregation.py` of
    ATP-1010/FederatedLLM, commit 7bea158.
    """
    us, vs = _sides(updates)
    return torch.cat(us, dim=1), torch.cat([weight * v for weight, v in zip(weights, vs, strict=True)], dim=1)


def _sides(updates: Sequence[Factors]) -> tuple[list[Tensor], list[Tensor]]:
    return [u for u, _ in updates], [v for _, v in updates]
