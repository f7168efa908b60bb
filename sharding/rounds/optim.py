"""Train factorized layers with any torch optimizer: clip the steps of rare terms, and decay the Frobenius norm.

Clipping. The gradient of u'ᵢ carries the factor ωᵢ, and so does the effect of a step of u'ᵢ on the client's function:
rare terms, whose ω is large, move too fast. Their gradients are multiplied by min(1, τ/ωᵢ) before the optimizer (and
its momentum) uses them (Korzhenkov & Louizos, section on local training).

Frobenius decay. Decay of U and V is not decay of their product. This term decays ‖UΩVᵀ‖²_F itself (Khodak et al., ICLR
2021). Its gradients have closed forms, 2·UΩ(VᵀV)Ω and 2·VΩ(UᵀU)Ω, with n×n Gram matrices and never the full matrix.

Bounded decay. One step of the decay removes the share 2ηδω²‖v'ᵢ‖² of u'ᵢ (η the learning rate after clipping, δ the
decay's strength). Without clipping, ω = 1/π of a rare term makes this share larger than one; the term then oscillates
and diverges, and the literal form loses clients. So the default lowers such an ω, only in the decay, until the share is
one.

Both act on gradients alone, so they are one hook that an optimizer calls before its step.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sharding.errors import UserError, safe_repr
from sharding.layers import FactorizedLayer
from sharding.modules.wrappers import distribute_like, full_tensor, is_distributed
from sharding.validation import is_number

DecayOf = Literal["bounded", "effective"]
StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


def factorized_layers(model: nn.Module) -> list[FactorizedLayer]:
    """Return the factorized layers of a model, in order of registration."""
    return [module for module in model.modules() if isinstance(module, FactorizedLayer)]


def clip_and_decay(
    model: nn.Module, clip: float | None = 10.0, decay: float = 1e-4, decay_of: DecayOf = "bounded"
) -> StepHook:
    """Return a hook that clips the gradients of factorized layers and adds those of the Frobenius decay::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(clip_and_decay(model))

    The usual ``loss.backward(); optimizer.step()`` works, with `torch.amp.GradScaler` and accumulated gradients too.
    The hook changes only gradients of its optimizer's parameters, so several optimizers can each have one. It reads the
    multipliers at each step, so that it stays right when another shard is loaded.

    Args:
        model: with factorized layers; other parameters keep their gradients.
        clip: τ ≥ 1: gradients of u'ᵢ and v'ᵢ are multiplied by min(1, τ/ωᵢ); None for no clipping. The
            client of a shard takes `Shard.clip`.
        decay: δ, the strength of the decay δ Σ ‖UΩVᵀ‖²_F; 0 for none.
        decay_of: ``effective`` decays UΩVᵀ, as published; ``bounded`` decays it with ωᵢ lowered to at most
            1/√(2ηδ·max(‖u'ᵢ‖², ‖v'ᵢ‖²)), so that no step of the decay removes more than a whole vector.

    Raises:
        UserError: the clip is below 1, the decay is not a finite number of at least 0, or `decay_of` is unknown.

    Source: Korzhenkov & Louizos, section on local training; Khodak et al., ICLR 2021, for the decay.
    """
    check_clip(clip)
    if not (is_number(decay) and decay >= 0):
        raise UserError(f"decay is {safe_repr(decay)}; a finite number of at least 0 is needed")
    if decay_of not in get_args(DecayOf):
        raise UserError(f"decay_of is {safe_repr(decay_of)}; it is one of {', '.join(get_args(DecayOf))}")
    layers = factorized_layers(model)

    @torch.no_grad()
    def hook(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        scale = getattr(optimizer, "grad_scale", None)  # what a fused optimizer will divide the gradients by
        for layer in layers:
            parts = (part for part in (layer.u, layer.v) if id(part) in rates)
            gradients = {id(part): part.grad for part in parts if part.grad is not None}
            if not gradients:
                continue
            factor = None if clip is None else (clip / layer.multipliers).clamp(max=1.0)
            if decay:
                step = decay * rates[next(iter(gradients))]
                omega = decay_multipliers(decay_of, layer, step if factor is None else step * factor)
                for part, gradient in decay_gradients(layer, omega):
                    if id(part) in gradients:
                        gradients[id(part)].add_(gradient if scale is None else gradient * scale, alpha=decay)
            if factor is not None:
                for gradient in gradients.values():
                    gradient.mul_(distribute_like(factor, gradient, copies=True))

    return hook


def check_clip(clip: float | None) -> None:
    """Raise a UserError if τ is below 1."""
    if clip is not None and not clip >= 1:
        raise UserError(f"clip is {clip}, but τ must be at least 1 (10 is the usual value); use None for no clipping")


@torch.no_grad()
def decay_multipliers(of: DecayOf, layer: FactorizedLayer, step: float | Tensor) -> Tensor:
    """Return the Ω that the decay sees, shape (n,).

    Args:
        of: ``effective`` or ``bounded``, see `clip_and_decay`.
        layer: the layer.
        step: ηδ, the learning rate times the decay's strength, and times the clip factors (n,), if any.
    """
    if of == "effective":
        return layer.multipliers
    size = torch.maximum(full_tensor(layer.u.square().sum(0)), full_tensor(layer.v.square().sum(0)))
    return torch.minimum(layer.multipliers, (2 * step * size).rsqrt())


@torch.no_grad()
def decay_gradients(layer: FactorizedLayer, multipliers: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Return u and v, each with the gradient of ‖UΩVᵀ‖²_F: 2·UΩ(VᵀV)Ω and 2·VΩ(UᵀU)Ω, of every block."""
    with torch.autocast(layer.u.device.type, enabled=False):
        u, v = _blocks(layer, layer.u), _blocks(layer, layer.v)
        omega = 2 * multipliers[:, None] * multipliers
        gradients = []
        for part, side, other in ((layer.u, u, v), (layer.v, v, u)):
            gradient = side @ distribute_like(_gram(other) * omega, part, copies=True)
            gradients.append((part, gradient.flatten(0, 1) if layer.num_blocks > 1 else gradient))
    return gradients


def can_be_fused(model: nn.Module) -> bool:
    """Return whether torch's fused optimizers are right for all parameters: they write to the gaps of strided ones."""
    sparse = any(getattr(module, "sparse", False) for module in model.modules())  # the gradients of an embedding
    return not sparse and not any(
        part.is_complex() or is_distributed(part) or _has_gaps(part) for part in model.parameters()
    )


def _has_gaps(tensor: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < tensor.numel() != span


def _blocks(layer: FactorizedLayer, factor: Tensor) -> Tensor:
    return factor.unflatten(0, (layer.num_blocks, -1)) if layer.num_blocks > 1 else factor


def _gram(factor: Tensor) -> Tensor:
    return full_tensor(factor.mT @ factor)
