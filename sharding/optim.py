"""Train factorized layers: clip the steps of rare terms, and decay the Frobenius norm.

Clipping. The gradient of u'ᵢ carries the factor ωᵢ, and so does the effect of a step of u'ᵢ on the client's function:
rare terms, whose ω is large, move too fast. Their gradients are multiplied by min(1, τ/ωᵢ) before the optimizer (and
its momentum) uses them (Korzhenkov & Louizos, section on local training).

Frobenius decay. Decay of U and V is not decay of their product. This term decays ‖UΩVᵀ‖²_F itself (Khodak et al., ICLR
2021), computed from n×n Gram matrices, never from the full matrix.

Bounded decay. One step of the decay removes the share 2ηδω²‖v'ᵢ‖² of u'ᵢ (η the learning rate after clipping, δ the
decay's strength). Without clipping, ω = 1/π of a rare term makes this share larger than one; the term then oscillates
and diverges, and the literal form loses clients. So the default lowers such an ω, only in the decay, until the share is
one.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sharding.errors import UserError, shown
from sharding.layers import FactorizedLayer
from sharding.modules.wrappers import distribute_like, full_tensor, is_distributed
from sharding.validation import is_number

DecayOf = Literal["bounded", "effective"]


def factorized_layers(model: nn.Module) -> list[FactorizedLayer]:
    """Return the factorized layers of a model, in order of registration."""
    return [module for module in model.modules() if isinstance(module, FactorizedLayer)]


def clip_factors(layers: Iterable[FactorizedLayer], clip: float) -> list[Tensor]:
    """Return min(1, τ/ω) for each layer, shape (n,); valid for one round, like the multipliers.

    Raises:
        UserError: the clip τ is below 1.
    """
    if not clip >= 1:
        raise UserError(f"clip is {clip}, but τ must be at least 1 (10 is the usual value); use inf for no clipping")
    return [(clip / layer.multipliers).clamp(max=1.0) for layer in layers]


@torch.no_grad()
def clip_effective_lr(layers: Iterable[FactorizedLayer], factors: Iterable[Tensor]) -> None:
    """Multiply the gradients of u'ᵢ and v'ᵢ by their factors, in place; call between `backward` and `step`."""
    for layer, factor in zip(layers, factors, strict=True):
        for parameter in (layer.u, layer.v):
            if parameter.grad is not None:
                parameter.grad.mul_(distribute_like(factor, parameter.grad, copies=True))


def frobenius_decay(layers: Iterable[FactorizedLayer], multipliers: Iterable[Tensor] | None = None) -> Tensor:
    """Return Σ ‖UΩVᵀ‖²_F over the layers, a differentiable scalar; 0 without layers.

    ‖UΩVᵀ‖²_F = tr(Ω UᵀU Ω VᵀV), the sum of the elementwise product of two n×n Grams, in the factors' own precision.

    Args:
        layers: factorized layers.
        multipliers: Ω to use instead of each layer's own, shape (n,).
    """
    layers = list(layers)
    if not layers:
        return torch.zeros(())
    omegas = [layer.multipliers for layer in layers] if multipliers is None else multipliers
    with torch.autocast(layers[0].u.device.type, enabled=False):
        return torch.stack([_square_norm(layer, omega) for layer, omega in zip(layers, omegas, strict=True)]).sum()


@torch.no_grad()
def decay_multipliers(of: DecayOf, layer: FactorizedLayer, step: float | Tensor) -> Tensor:
    """Return the Ω that the decay sees, shape (n,).

    Args:
        of: ``effective`` decays UΩVᵀ, as published; ``bounded`` decays it with ωᵢ lowered to at most
            1/√(2·step·max(‖u'ᵢ‖², ‖v'ᵢ‖²)), so that no step of the decay removes more than the whole vector.
        layer: the layer.
        step: ηδ, the learning rate times the decay's strength, and times the clip factors (n,), if any.
    """
    if of == "effective":
        return layer.multipliers
    size = torch.maximum(full_tensor(layer.u.square().sum(0)), full_tensor(layer.v.square().sum(0)))
    return torch.minimum(layer.multipliers, (2 * step * size).rsqrt())


def _square_norm(layer: FactorizedLayer, multipliers: Tensor) -> Tensor:
    omega = distribute_like(multipliers, layer.u, copies=True)
    u, v = layer.u * omega, layer.v
    if layer.num_blocks > 1:
        u, v = (factor.unflatten(0, (layer.num_blocks, -1)) for factor in (u, v))
    return (_gram(u) * _gram(v)).sum()


def _can_be_fused(model: nn.Module) -> bool:
    """Return whether torch's fused SGD is right for all parameters: it writes to the gaps of those that have some."""
    sparse = any(getattr(module, "sparse", False) for module in model.modules())  # the gradients of an embedding
    return not sparse and not any(
        part.is_complex() or is_distributed(part) or _has_gaps(part) for part in model.parameters()
    )


def _has_gaps(tensor: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < tensor.numel() != span


def _gram(factor: Tensor) -> Tensor:
    return full_tensor(factor.mT @ factor)


class LocalSGD:
    """A client's optimizer for one round: SGD on loss + decay·Σ‖UΩVᵀ‖²_F, with the effective learning rate clipped.

    Args:
        model: the client's model with this round's shard; clipping uses its multipliers.
        lr: the learning rate.
        momentum: of SGD.
        frobenius_decay: the strength of the decay.
        decay_of: what decays, see `decay_multipliers`.
        clip: τ ≥ 1, or None for no clipping.

    Raises:
        UserError: the clip is below 1, lr, momentum or decay is not a finite number of at least 0, `decay_of` is
            unknown, or all parameters are frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.9,
        frobenius_decay: float = 1e-4,
        clip: float | None = 10.0,
        decay_of: DecayOf = "bounded",
    ) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("all parameters of the model are frozen, so there is nothing to train; set requires_grad")
        for name, value in (("lr", lr), ("momentum", momentum), ("frobenius_decay", frobenius_decay)):
            if not (is_number(value) and value >= 0):
                raise UserError(f"{name} is {shown(value)}; a finite number of at least 0 is needed")
        if decay_of not in get_args(DecayOf):
            raise UserError(f"decay_of is {shown(decay_of)}; it is one of {', '.join(get_args(DecayOf))}")
        self._layers = factorized_layers(model)
        self._factors = None if clip is None else clip_factors(self._layers, clip)
        self._decay, self._decay_of = frobenius_decay, decay_of
        factors = [1.0] * len(self._layers) if self._factors is None else self._factors
        self._decay_steps = [lr * frobenius_decay * factor for factor in factors]
        self._sgd = torch.optim.SGD(model.parameters(), lr, momentum=momentum, fused=_can_be_fused(model))

    def step(self, loss: Tensor) -> None:
        """Take one step on a loss, a differentiable scalar."""
        decay = self._decay * frobenius_decay(self._layers, self._decayed()) if self._layers and self._decay else 0.0
        self._sgd.zero_grad()
        (loss + decay).backward()
        if self._factors is not None:
            clip_effective_lr(self._layers, self._factors)
        self._sgd.step()

    def _decayed(self) -> list[Tensor]:
        return [
            decay_multipliers(self._decay_of, layer, step)
            for layer, step in zip(self._layers, self._decay_steps, strict=True)
        ]
