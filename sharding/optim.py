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
from sharding.wrappers import spread_like, whole


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
                parameter.grad.mul_(spread_like(factor, parameter.grad, copies=True))


def frobenius_decay(layers: Iterable[FactorizedLayer]) -> Tensor:
    """Return Σ ‖UΩVᵀ‖²_F over the layers, a scalar that can be differentiated; 0 if there are none.

    ‖UΩVᵀ‖²_F = tr(Ω UᵀU Ω VᵀV), the sum of the elementwise product of two n×n Grams, in the factors' own precision.
    """
    layers = list(layers)
    if not layers:
        return torch.zeros(())
    with torch.autocast(layers[0].u.device.type, enabled=False):
        return torch.stack([_square_norm(layer) for layer in layers]).sum()


def _square_norm(layer: FactorizedLayer) -> Tensor:
    omega = spread_like(layer.multipliers, layer.u, copies=True)
    return (_gram(layer.u * omega) * _gram(layer.v)).sum()


def _gram(factor: Tensor) -> Tensor:
    return whole(factor.mT @ factor)


class LocalSGD:
    """A client's optimizer for one round: SGD on loss + decay·Σ‖UΩVᵀ‖²_F, with the effective learning rate clipped.

    Args:
        model: the client's, with the shard of this round loaded: clipping goes by its multipliers.
        lr: the learning rate.
        momentum: of SGD.
        frobenius_decay: the strength of the decay.
        clip: τ ≥ 1, or None for no clipping.

    Raises:
        UserError: the clip is below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.9,
        frobenius_decay: float = 1e-4,
        clip: float | None = 10.0,
    ) -> None:
        self._layers = factorized_layers(model)
        self._factors = None if clip is None else clip_factors(self._layers, clip)
        self._decay = frobenius_decay
        fused = not any(parameter.is_complex() for parameter in model.parameters())
        self._sgd = torch.optim.SGD(model.parameters(), lr, momentum=momentum, fused=fused)

    def step(self, loss: Tensor) -> None:
        """Take one step down from a loss, a scalar that can be differentiated."""
        decay = self._decay * frobenius_decay(self._layers) if self._layers and self._decay else 0.0
        self._sgd.zero_grad()
        (loss + decay).backward()
        if self._factors is not None:
            clip_effective_lr(self._layers, self._factors)
        self._sgd.step()
