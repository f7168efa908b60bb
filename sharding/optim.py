"""What is particular to training factorized layers: clipping the effective learning rate, and Frobenius decay.

Clipping. The gradient of u'ᵢ carries the factor ωᵢ, and so does the effect of a step of u'ᵢ on the client's function:
rare terms, whose ω is large, move too fast. Their gradients are multiplied by min(1, τ/ωᵢ) before the optimizer (and
its momentum) sees them (Korzhenkov & Louizos, section on local training).

Frobenius decay. Decaying U and V apart is not decaying their product; this decays ‖UΩVᵀ‖²_F itself (Khodak et al.,
ICLR 2021), through n×n Gram matrices, never through the full matrix.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.layers import FactorizedLayer


def factorized_layers(model: nn.Module) -> list[FactorizedLayer]:
    """Return the factorized layers of a model, in order of registration."""
    return [module for module in model.modules() if isinstance(module, FactorizedLayer)]


def clip_factors(layers: Iterable[FactorizedLayer], clip: float) -> list[Tensor]:
    """Return min(1, τ/ω) for each layer, shape (n,); they hold for as long as the multipliers do, one whole round.

    Raises:
        UserError: the clip τ is below 1.
    """
    if clip < 1:
        raise UserError(f"clip is {clip}, but τ must be at least 1 (10 is the usual value); use inf for no clipping")
    return [(clip / layer.multipliers).clamp(max=1.0) for layer in layers]


@torch.no_grad()
def clip_effective_lr(layers: Iterable[FactorizedLayer], factors: Iterable[Tensor]) -> None:
    """Multiply the gradients of u'ᵢ and v'ᵢ by their factors, in place; call between `backward` and `step`."""
    for layer, factor in zip(layers, factors, strict=True):
        for parameter in (layer.u, layer.v):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def frobenius_decay(layers: Iterable[FactorizedLayer]) -> Tensor:
    """Return Σ ‖UΩVᵀ‖²_F over the layers, a scalar that can be differentiated.

    ‖UΩVᵀ‖²_F = tr(Ω UᵀU Ω VᵀV), the sum of the elementwise product of two n×n Grams.
    """
    return torch.stack([(_gram(layer.scaled_u) * _gram(layer.v)).sum() for layer in layers]).sum()


def _gram(factor: Tensor) -> Tensor:
    return factor.mT @ factor
