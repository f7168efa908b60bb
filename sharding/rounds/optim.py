"""Train factorized layers with any torch optimizer: clip the steps of rare terms, and decay the Frobenius norm.

Clipping. The gradient of u'ᵢ carries the factor ωᵢ, and so does the effect of a step of u'ᵢ on the client's function:
rare terms, whose ω is large, move too fast. Their steps are multiplied by min(1, τ/ωᵢ) (Korzhenkov & Louizos, section
on local training). The step of SGD is linear in the gradients, so there the gradients are multiplied, before the
momentum uses them. Adam and its relatives divide a constant factor out again, so there the change of u' and v' is
multiplied, after the step.

Frobenius decay. Decay of U and V is not decay of their product. This term decays ‖UΩVᵀ‖²_F itself (Khodak et al., ICLR
2021). Its gradients have closed forms, 2·UΩ(VᵀV)Ω and 2·VΩ(UᵀU)Ω, with n×n Gram matrices and never the full matrix.
Layers of one shape are computed together, since on a GPU the number of operations is what costs.

Bounded decay. One step of the decay removes the share 2ηδω²‖v'ᵢ‖² of u'ᵢ (η the learning rate after clipping, δ the
decay's strength). Without clipping, ω = 1/π of a rare term makes this share larger than one; the term then oscillates
and diverges, and the literal form loses clients. So the default lowers such an ω, only in the decay, until the share is
one.
"""

from collections.abc import Callable, Hashable, Iterable
from inspect import Parameter, signature
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sharding.errors import UserError, safe_repr
from sharding.layers import FactorizedLayer
from sharding.layers.base import factorized_layers
from sharding.modules.wrappers import distribute_like, full_tensor, is_distributed
from sharding.validation import is_number, typed

DecayOf = Literal["bounded", "effective"]
LARGE = 2**20  # numbers in a layer's factors: such a layer is computed alone, since a stack of several takes memory


@typed
def clip_and_decay(
    model: nn.Module, clip: float | None = 10.0, decay: float = 1e-4, decay_of: DecayOf = "bounded"
) -> "StepHook":
    """Return a hook that clips the steps of factorized layers and adds the gradients of the Frobenius decay::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(clip_and_decay(model))

    The usual ``loss.backward(); optimizer.step()`` works, as do ``optimizer.step(closure)``, `torch.amp.GradScaler` and
    accumulated gradients. The hook changes only its optimizer's parameters, so several optimizers can each have one. It
    reads the multipliers at each step, so that it stays right when another shard is loaded. Where an optimizer wraps
    another one (accelerate, Opacus), register it on the inner one.

    Args:
        model: a model with factorized layers; other parameters keep their gradients.
        clip: τ ≥ 1: the steps of u'ᵢ and v'ᵢ are multiplied by min(1, τ/ωᵢ); None for no clipping. The client of a
            shard takes `Shard.clip`.
        decay: δ, the strength of the decay δ Σ ‖UΩVᵀ‖²_F; 0 for none.
        decay_of: ``effective`` decays UΩVᵀ, as published; ``bounded`` decays it with ωᵢ lowered to at most
            1/√(2ηδ·max(‖u'ᵢ‖², ‖v'ᵢ‖²)), so that no step of the decay removes more than a whole vector.

    Raises:
        UserError: the clip is below 1, the decay is not a finite number of at least 0, or `decay_of` is unknown; at a
            step, the optimizer needs a closure, as `LBFGS` does.

    Source: Korzhenkov & Louizos, section on local training; Khodak et al., ICLR 2021, for the decay.
    """
    check_clip(clip)
    if not (is_number(decay) and decay >= 0):
        raise UserError(f"decay is {safe_repr(decay)}; a finite number of at least 0 is needed")
    if decay_of not in get_args(DecayOf):
        raise UserError(f"decay_of is {safe_repr(decay_of)}; it is one of {', '.join(get_args(DecayOf))}")
    return StepHook(list(factorized_layers(model).values()), clip, decay, decay_of)


class StepHook:
    """What an optimizer calls before each step; see `clip_and_decay`."""

    def __init__(self, layers: list[FactorizedLayer], clip: float | None, decay: float, decay_of: DecayOf) -> None:
        self._layers, self._clip, self._decay, self._decay_of = layers, clip, decay, decay_of
        self._scaled: WeakSet[Optimizer] = WeakSet()  # optimizers whose steps are scaled afterwards
        self._before: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # values before the step, and their factors
        self._read: list[tuple[int, int]] = []  # which multipliers were compared with the clip
        self._clips = False

    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Change the gradients, or let the closure that computes them do so."""
        self._before.clear()  # of a step that raised
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._change_gradients(optimizer)
            return None
        check_optimizer(optimizer)

        def closure_and_hook() -> Any:
            loss = closure()
            self._change_gradients(optimizer)
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": closure_and_hook}
        return (args[0], closure_and_hook, *args[2:]), kwargs

    @torch.no_grad()
    def _change_gradients(self, optimizer: Optimizer) -> None:
        groups = {part: index for index, group in enumerate(optimizer.param_groups) for part in group["params"]}

        def trains(part: nn.Parameter) -> bool:
            return part.grad is not None and part in groups

        def group_of(layer: FactorizedLayer) -> int:
            return groups[layer.u if trains(layer.u) else layer.v]

        def form(layer: FactorizedLayer) -> Hashable:
            """Return what layers whose Gram matrices are computed together have in common."""
            types = layer.u.dtype, layer.multipliers.dtype, layer.u.device
            return group_of(layer), layer.num_terms, layer.num_blocks, *types

        def shapes(layer: FactorizedLayer) -> Hashable:
            """Return what layers whose factors are stacked have in common."""
            is_large = layer.u.numel() + layer.v.numel() > LARGE or is_distributed(layer.u)
            return layer.u.shape, layer.v.shape, layer if is_large else None

        layers = [layer for layer in self._layers if trains(layer.u) or trains(layer.v)]
        clip = self._clip if layers and self._is_clipping() else None
        decays: list[tuple[nn.Parameter, Tensor]] = []
        factors: list[tuple[nn.Parameter, Tensor]] = []
        for alike in _alike(layers, form):
            batches = _alike(alike, shapes)
            ordered = [layer for batch in batches for layer in batch]
            omega = torch.stack([layer.multipliers for layer in ordered])
            factor = None if clip is None else (clip / omega).clamp(max=1.0)
            if self._decay:
                step = self._decay * optimizer.param_groups[group_of(alike[0])]["lr"]
                bound = None if self._decay_of == "effective" else step if factor is None else step * factor
                decays += decay_gradients(batches, omega, bound)
            if factor is not None:
                rows = zip(ordered, factor, strict=True)
                factors += [(part, row) for layer, row in rows for part in (layer.u, layer.v)]
        pairs = [
            (part.grad, -change if optimizer.param_groups[groups[part]].get("maximize") else change)
            for part, change in decays
            if part.grad is not None and trains(part)
        ]
        if pairs:
            gradients, changes = zip(*pairs, strict=True)
            if (scale := getattr(optimizer, "grad_scale", None)) is not None:
                changes = torch._foreach_mul(changes, scale)  # a fused optimizer divides the gradients by it
            torch._foreach_add_(gradients, changes, alpha=self._decay)
        factors = [(part, distribute_like(factor, part, copies=True)) for part, factor in factors if trains(part)]
        if type(optimizer) is SGD:
            for part, factor in factors:
                assert part.grad is not None
                part.grad.mul_(factor)
        elif factors:
            if optimizer not in self._scaled:
                optimizer.register_step_post_hook(self._scale_steps)
                self._scaled.add(optimizer)
            for part, factor in factors:
                self._before.setdefault(part, (part.detach().clone(), factor))

    @torch.no_grad()
    def _scale_steps(self, *_: Any) -> None:
        """Multiply the step that was taken by the factors."""
        for part, (before, factor) in self._before.items():
            part.copy_(before.lerp(part, factor.to(part.dtype)))
        self._before.clear()

    def _is_clipping(self) -> bool:
        """Whether a multiplier may be above τ; they are compared once for each shard, since that waits for a GPU."""
        if self._clip is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return self._clip is not None
        multipliers = [layer.multipliers for layer in self._layers]
        if (read := [(id(each), each._version) for each in multipliers]) != self._read:
            together = [
                torch.cat([each for each in multipliers if each.device == at]) for at in {m.device for m in multipliers}
            ]
            self._read, self._clips = read, any(bool(each.max() > self._clip) for each in together)
        return self._clips


def decay_gradients(
    batches: list[list[FactorizedLayer]], omega: Tensor, step: float | Tensor | None = None
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return u and v of each layer, each with the gradient of ‖UΩVᵀ‖²_F: 2·UΩ(VᵀV)Ω and 2·VΩ(UᵀU)Ω, of every block.

    Args:
        batches: batches of layers with one number of terms and blocks; in a batch, of one shape.
        omega: ω of all layers in this order, shape (layers, n).
        step: the step of the bounded decay, ηδ, or this times the clip factors (layers, n).
    """
    with torch.no_grad(), torch.autocast(omega.device.type, enabled=False):
        blocks, n = batches[0][0].num_blocks, omega.shape[1]
        sides = [
            tuple(_stacked([getattr(layer, part) for layer in batch], blocks) for part in "uv") for batch in batches
        ]
        grams = [
            torch.cat([full_tensor(pair[side].mT @ pair[side]).view(-1, blocks, n, n) for pair in sides])
            for side in (0, 1)
        ]
        if step is not None:
            squares = (gram.diagonal(dim1=-2, dim2=-1).sum(1) for gram in grams)  # ‖u'‖² and ‖v'‖², (layers, n)
            omega = torch.minimum(omega, (2 * step * torch.maximum(*squares)).rsqrt())
        weights = (2 * omega[:, :, None] * omega[:, None])[:, None]
        weighted = [(gram * weights).split([len(batch) for batch in batches]) for gram in grams]
        gradients: list[tuple[nn.Parameter, Tensor]] = []
        for index, batch in enumerate(batches):
            for part, side, other in (("u", 0, 1), ("v", 1, 0)):
                factor = sides[index][side]
                matrix = weighted[other][index].view(*factor.shape[:-2], n, n)
                matrix = distribute_like(matrix, factor, copies=True)
                product = factor @ matrix if factor.is_contiguous() else (matrix.mT @ factor.mT).mT  # laid out alike
                product = product.flatten(-3, -2) if blocks > 1 else product
                parts = [getattr(layer, part) for layer in batch]
                gradients += zip(parts, product.unbind() if len(batch) > 1 else [product], strict=True)
    return gradients


def check_clip(clip: object) -> None:
    """Raise a UserError if τ is below 1."""
    if clip is not None and not ((isinstance(clip, float) or is_number(clip)) and clip >= 1):
        raise UserError(
            f"clip is {safe_repr(clip)}, but τ must be at least 1 (10 is the usual value); use None for no clipping"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise a UserError unless an optimizer steps once for each gradient and calls hooks.

    `LBFGS` needs a closure, and what wraps another optimizer has no hooks.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"the optimizer is a {name}; a torch optimizer is needed, such as SGD(parameters, lr=0.1)")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UserError(f"a {name} wraps an optimizer and has no step hooks; pass the optimizer in it")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise UserError(f"{name} needs a closure, which is called several times a step; use SGD or Adam")


def can_be_fused(model: nn.Module) -> bool:
    """Return whether torch's fused optimizers are right for all parameters: they write to the gaps of strided ones."""
    if any(getattr(module, "sparse", False) for module in model.modules()):  # the gradients of an embedding
        return False
    for part in model.parameters():
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        if part.is_complex() or is_distributed(part) or 0 < part.numel() != span:
            return False
    return True


def _alike(
    layers: Iterable[FactorizedLayer], key: Callable[[FactorizedLayer], Hashable]
) -> list[list[FactorizedLayer]]:
    """Return the layers in lists of equal keys."""
    lists: dict[Hashable, list[FactorizedLayer]] = {}
    for layer in layers:
        lists.setdefault(key(layer), []).append(layer)
    return list(lists.values())


def _stacked(factors: list[nn.Parameter], blocks: int) -> Tensor:
    """Return factors as one tensor ([layers,] [blocks,] rows, n), without the layers where there is one."""
    parts = [factor.unflatten(0, (blocks, -1)) if blocks > 1 else factor for factor in factors]
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts) if parts[0].is_contiguous() else torch.stack([part.mT for part in parts]).mT
