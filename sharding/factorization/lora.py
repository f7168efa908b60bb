"""Export what training changed in factorized layers as a LoRA adapter in PEFT's form.

The change of a layer, U'Ω'V'ᵀ − UΩVᵀ, has rank 2n at most: it is an adapter with B = [U'Ω', −UΩ] and A = [V', V]ᵀ. On
the dense model that the terms came from, this adapter adds what was learned and keeps the terms that were dropped. If
the start is the dense model itself, the adapter holds the whole difference to the factorized model; its rank is the
rank of that difference.

With a residual, only the first is possible: the adapter adds what the terms learned, on the dense weights or on the
residual and the terms before training alike.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sharding.errors import UserError, few
from sharding.factorization.choose import Patterns, aliases, matching
from sharding.layers import FactorizedEmbedding, FactorizedLayer, FactorizedLinear
from sharding.layers.conv import FactorizedConv
from sharding.layers.linear import FactorizedTransposedLinear
from sharding.modules.finite import find_nonfinite
from sharding.modules.wrappers import unwrap

KINDS = (FactorizedLinear, FactorizedTransposedLinear, FactorizedEmbedding, FactorizedConv)


def freeze_except_factors(model: nn.Module) -> nn.Module:
    """Freeze all parameters but u and v of the factorized layers, in place, and return the model.

    Factors that are frozen already stay frozen. Batch norms still update their running statistics in training mode;
    call `eval()` on them if you want to export an adapter.
    """
    factors = {id(its) for part in model.modules() if isinstance(part, FactorizedLayer) for its in (part.u, part.v)}
    for parameter in model.parameters():
        if id(parameter) not in factors:
            parameter.requires_grad_(False)
    return model


def export_lora(model: nn.Module, start: nn.Module, folder: str | Path, modules_to_save: Patterns = ()) -> None:
    """Write the change of a model's factorized layers as an adapter that `peft.PeftModel.from_pretrained` loads.

    An adapter holds only factors. Call `freeze_except_factors` before training, or list the other modules that were
    trained, such as a new head, in `modules_to_save`. Where attention was unpacked or layers were split, load the
    adapter on a model that was treated alike, by `unpack_attention` or `split_layers`.

    Args:
        model: the factorized model, trained.
        start: the factorized model before training, or the dense model that it was made from.
        folder: where ``adapter_config.json`` and ``adapter_model.safetensors`` are written.
        modules_to_save: modules that the adapter stores whole, as in `peft.LoraConfig`; patterns as for `factorize`.

    Raises:
        UserError: PEFT cannot represent a layer (a convolution that is transposed, dilated, grouped, or padded with
            anything but zeros, or a layer with two names), `start` lacks it (it was unpacked or split from a layer of
            the dense model) or its residual, something outside the factors and `modules_to_save` changed, a parameter
            has NaN or Inf, a pattern matches nothing, or the folder holds an adapter already.
    """
    model, start, folder = unwrap(model), unwrap(start), Path(folder)
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds an adapter already; choose another folder or remove it")
    layers = {name: part for name, part in model.named_modules() if isinstance(part, FactorizedLayer)}
    saved = _outermost(matching(model, dict(model.named_modules()), modules_to_save, "modules_to_save"))
    _check(model, start, layers, saved)
    pairs = {name: _shaped(layer, *_change(layer, start.get_submodule(name))) for name, layer in layers.items()}
    ranks = {f"^{re.escape(name)}": len(a) for name, (a, _) in pairs.items()}
    largest = max(ranks.values())
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": largest,
        "lora_alpha": largest,  # a scale of 1
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "target_modules": "|".join(map(re.escape, pairs)),
        "fan_in_fan_out": any(isinstance(layer, FactorizedTransposedLinear) for layer in layers.values()),
        "modules_to_save": saved or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "task_type": None,
        "base_model_name_or_path": None,
    }
    tensors: dict[str, Tensor] = {}
    for name, pair in pairs.items():
        form = "lora_embedding_{}" if isinstance(layers[name], FactorizedEmbedding) else "lora_{}.weight"
        for side, tensor in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{name}.{form.format(side)}"] = tensor.cpu().contiguous()
    for name in saved:
        for key, tensor in model.get_submodule(name).state_dict(prefix=f"base_model.model.{name}.").items():
            tensors[key] = tensor.detach().cpu().contiguous().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _outermost(names: Collection[str]) -> list[str]:
    """Return the names without those of modules inside another one."""
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def _check(model: nn.Module, start: nn.Module, layers: Mapping[str, FactorizedLayer], saved: list[str]) -> None:
    if "" in layers:
        raise UserError(
            f"this {type(model).__name__} is the whole model, and PEFT adapts layers inside one; put it, and what it "
            "started from, in an nn.Sequential"
        )
    if not layers:
        raise UserError(f"this {type(model).__name__} has no factorized layers to export")
    before = dict(start.named_modules())
    problems = [f"{name}, {what}, has no form as LoRA" for name, part in layers.items() if (what := _formless(part))]
    problems += [f"{name} is not in the model it started from" for name in layers if name not in before]
    problems += [
        f"{name} has a residual, which the start lacks; start from the factorized model before training"
        for name, part in layers.items()
        if name in before and not _same_residual(part, before[name])
    ]
    names = aliases(model)
    problems += [f"{name} has another name too; PEFT would adapt one" for name in layers if len(names[name]) > 1]
    if broken := find_nonfinite(dict(model.named_parameters())):
        problems.append(f"{broken} has NaN or Inf")
    problems += [f"{name} is factorized; leave it out of modules_to_save" for name in layers if _is_in(name, saved)]
    if changed := [name for name in _changed(model, start, layers) if not _is_in(name, saved)]:
        problems.append(
            f"{len(changed)} tensors outside the factors changed: {few(changed)}. Call freeze_except_factors(model) "
            "before training, or list their modules in modules_to_save"
        )
    if problems:
        raise UserError(f"cannot export an adapter: {'; '.join(problems)}")


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _changed(model: nn.Module, start: nn.Module, layers: Iterable[str]) -> list[str]:
    """Return the names of the parameters and buffers outside the factors that are not as they were."""
    before = dict(start.named_parameters()) | dict(start.named_buffers())
    inside = tuple(f"{name}." for name in layers)
    return [
        name
        for name, part in [*model.named_parameters(), *model.named_buffers()]
        if (not name.startswith(inside) or name.endswith(".bias"))
        and not name.endswith(".num_batches_tracked")
        and not (name in before and torch.equal(before[name], part))
    ]


def _same_residual(layer: FactorizedLayer, before: nn.Module) -> bool:
    """Return whether a layer and what it started from have the same residual, or both have none."""
    start = before.residual if isinstance(before, FactorizedLayer) else None
    if layer.residual is None or start is None:
        return layer.residual is start
    return torch.equal(layer.residual, start)


def _formless(layer: FactorizedLayer) -> str | None:
    """Describe a layer that PEFT has no adapter for; return None if it has one."""
    kind = f"a {type(layer).__name__}"
    if isinstance(layer, FactorizedConv):
        if set(layer.dilation) != {1}:  # PEFT's convolutions are not dilated
            return f"{kind} with dilation"
        if layer.num_blocks > 1:  # PEFT cannot merge them
            return f"{kind} with groups"
        if layer.padding_mode != "zeros":
            return f"{kind} with padding_mode {layer.padding_mode!r}"
    return None if isinstance(layer, KINDS) else kind


def _change(layer: FactorizedLayer, before: nn.Module) -> tuple[Tensor, Tensor]:
    """Return B (rows, r) and A (columns, r), with B·Aᵀ the change of the matrix."""
    u, v = layer.scaled_u.detach(), layer.v.detach()
    if isinstance(before, FactorizedLayer):
        return torch.cat([u, -before.scaled_u.detach()], dim=1), torch.cat([v, before.v.detach()], dim=1)
    dense = before.weight
    assert isinstance(dense, Tensor)
    difference = u.double() @ v.double().mT - dense.detach().double().flatten(1)
    left, sizes, right = torch.linalg.svd(difference, full_matrices=False)
    rank = max(1, int((sizes > sizes.max() * 1e-12).sum()))
    root = sizes[:rank].sqrt()
    return (left[:, :rank] * root).to(dense.dtype), (right[:rank].mT * root).to(dense.dtype)


def _shaped(layer: FactorizedLayer, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B in the shapes that PEFT has for this kind of layer; the first axis of A counts the rank."""
    if isinstance(layer, FactorizedTransposedLinear | FactorizedEmbedding):
        return b.mT, a
    if isinstance(layer, FactorizedConv):
        ones = [1] * len(layer.kernel_size)
        return a.mT.reshape(-1, layer.in_channels, *layer.kernel_size), b.view(*b.shape, *ones)
    return a.mT, b
