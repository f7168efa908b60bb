"""Export what training changed in factorized layers as a LoRA adapter in PEFT's form.

The change of a layer, U'Ω'V'ᵀ − UΩVᵀ, has rank 2n at most: it is an adapter with B = [U'Ω', −UΩ] and A = [V', V]ᵀ. On
the dense model that the terms came from, this adapter adds what was learned and keeps the terms that were dropped. If
the start is the dense model itself, the adapter holds the whole difference to the factorized model; its rank is the
rank of that difference.

With a residual, only the first is possible: the adapter adds what the terms learned, on the dense weights or on the
residual and the terms before training alike.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from sharding.errors import UserError, join_first
from sharding.factorization.peft_check import Batch, check_loaded, check_outputs
from sharding.factorization.save import make_folder
from sharding.factorization.shardable import Patterns, aliases, matching
from sharding.factorization.support import TO_READ, check_supported
from sharding.layers import FactorizedEmbedding, FactorizedLayer, FactorizedLinear
from sharding.layers.base import factorized_layers
from sharding.layers.conv import FactorizedConv
from sharding.layers.linear import FactorizedTransposedLinear
from sharding.matrices.values import find_nonfinite
from sharding.modules.wrappers import (
    full_tensor,
    get_submodule,
    is_distributed,
    named_buffers,
    named_modules,
    named_parameters,
    named_state,
    unwrap,
)
from sharding.validation import typed

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KINDS = (FactorizedLinear, FactorizedTransposedLinear, FactorizedEmbedding, FactorizedConv)


@typed
def freeze_except_factors(model: nn.Module) -> nn.Module:
    """Freeze all parameters but u and v of the factorized layers, in place, and return the model.

    Factors that are frozen already stay frozen. Batch norms still update their running statistics in training mode;
    call `eval()` on them if you want to export an adapter.
    """
    factors = {id(factor) for layer in factorized_layers(model).values() for factor in (layer.u, layer.v)}
    for parameter in model.parameters():
        if id(parameter) not in factors:
            parameter.requires_grad_(False)
    return model


@typed
def export_lora(
    model: nn.Module,
    start: nn.Module,
    folder: str | Path,
    modules_to_save: Patterns = (),
    *,
    batch: Batch | None = None,
) -> None:
    """Write the change of a model's factorized layers as an adapter that `peft.PeftModel.from_pretrained` loads.

    An adapter holds only factors. Call `freeze_except_factors` before training, or list the other modules that were
    trained, such as a new head, in `modules_to_save`. Where attention was unpacked, load the adapter on
    `unpack_attention(model)`.

    PEFT does not follow every model. If it is installed, the adapter is loaded once, and must reach all of its layers.
    Only a comparison of outputs finds models whose forward pass reads `layer.weight` without a call of the layer, so
    pass a `batch`. A model that FSDP2 holds in pieces is gathered (without a batch): call the function on every
    process, and the first one writes.

    Args:
        model: the factorized model, trained.
        start: the factorized model before training, or the dense model that it was made from.
        folder: the folder that ``adapter_config.json`` and ``adapter_model.safetensors`` are written to.
        modules_to_save: modules that the adapter stores whole, as in `peft.LoraConfig`; patterns as for `factorize`.
        batch: inputs of the model, to compare its outputs with those of PEFT's: a tensor, a tuple of arguments, or a
            dict of keyword arguments. Models are copied and run in evaluation mode for that.

    Raises:
        UserError: PEFT cannot represent a layer (a convolution that is transposed, dilated, grouped, or padded with
            anything but zeros, or a layer with two names), `start` lacks it (it was unpacked from a layer of the
            dense model) or its residual, something outside the factors and `modules_to_save` changed, a parameter
            has NaN or Inf, a pattern matches nothing, the folder holds an adapter already, or PEFT applies the adapter
            in part, or not at all. Nothing is written then.
        ImportError: a batch is given, and PEFT is not installed.
    """
    model, start, folder = unwrap(model), unwrap(start), Path(folder)
    if (folder / CONFIG).exists():
        raise UserError(f"{folder} holds an adapter already; choose another folder or remove it")
    for part in (model, start):
        check_supported(part, TO_READ)
    layers = factorized_layers(model)
    matched = matching(model, dict(named_modules(model)), modules_to_save, "modules_to_save")
    saved = sorted(name for name in matched if not any(name.startswith(f"{outer}.") for outer in matched))
    _check(model, start, layers, saved)
    pairs = {name: _shaped(layer, *_change(layer, get_submodule(start, name))) for name, layer in layers.items()}
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
        for entry, tensor in named_state(get_submodule(model, name)).items():
            tensors[f"base_model.model.{name}.{entry}"] = full_tensor(tensor.detach()).cpu().contiguous().clone()
    distributed = any(map(is_distributed, (*model.parameters(), *start.parameters())))
    if distributed and dist.get_rank() != 0:
        return
    make_folder(folder.parent)
    with TemporaryDirectory(dir=folder.parent) as draft:
        save_file(tensors, f"{draft}/{WEIGHTS}")
        Path(draft, CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
        if not distributed:
            check_loaded(start, Path(draft), layers)
            if batch is not None:
                check_outputs(model, start, Path(draft), batch)
        make_folder(folder)
        for name in (WEIGHTS, CONFIG):
            os.replace(f"{draft}/{name}", folder / name)


def _check(model: nn.Module, start: nn.Module, layers: Mapping[str, FactorizedLayer], saved: list[str]) -> None:
    if "" in layers:
        raise UserError(
            f"this {type(model).__name__} is the whole model, and PEFT adapts layers inside one; put it, and what it "
            "started from, in an nn.Sequential"
        )
    if not layers:
        raise UserError(f"this {type(model).__name__} has no factorized layers to export")
    before = dict(named_modules(start))
    problems = [
        f"{name}, {kind}, has no form as LoRA" for name, part in layers.items() if (kind := _unrepresentable(part))
    ]
    problems += [f"{name} is not in the model it started from" for name in layers if name not in before]
    problems += [
        f"{name} has a residual, which the start lacks; start from the factorized model before training"
        for name, part in layers.items()
        if name in before and not _same_residual(part, before[name])
    ]
    problems += [
        f"{name} has a tail, which belongs to one round" for name, part in layers.items() if part.tail is not None
    ]
    names = aliases(model)
    problems += [f"{name} has another name too; PEFT would adapt one" for name in layers if len(names[name]) > 1]
    parameters = {name: full_tensor(part.detach()) for name, part in named_parameters(model)}
    if nonfinite := find_nonfinite(parameters):
        problems.append(f"{nonfinite} has NaN or Inf")
    problems += [f"{name} is factorized; leave it out of modules_to_save" for name in layers if _is_in(name, saved)]
    if changed := [name for name in _changed(model, start, layers) if not _is_in(name, saved)]:
        problems.append(
            f"{len(changed)} tensors outside the factors changed: {join_first(changed)}. Call "
            "freeze_except_factors(model) before training, or list their modules in modules_to_save"
        )
    if problems:
        raise UserError(f"cannot export an adapter: {'; '.join(problems)}")


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _changed(model: nn.Module, start: nn.Module, layers: Iterable[str]) -> list[str]:
    """Return the names of the parameters and buffers outside the factors that are not as they were."""
    before = dict(named_parameters(start)) | dict(named_buffers(start))
    inside = tuple(f"{name}." for name in layers)
    return [
        name
        for name, part in [*named_parameters(model), *named_buffers(model)]
        if (not name.startswith(inside) or name.endswith(".bias"))
        and not name.endswith(".num_batches_tracked")
        and not (name in before and torch.equal(full_tensor(before[name]).to(part.device), full_tensor(part)))
    ]


def _same_residual(layer: FactorizedLayer, before: nn.Module) -> bool:
    """Return whether a layer and what it started from have the same residual, or both have none."""
    start = before.residual if isinstance(before, FactorizedLayer) else None
    if layer.residual is None or start is None:
        return layer.residual is start
    return torch.equal(layer.residual, start.to(layer.residual.device))


def _unrepresentable(layer: FactorizedLayer) -> str | None:
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
    layer.compute_factors()
    u, v = (full_tensor(part.detach()) for part in (layer.scaled_u, layer.v))
    if isinstance(before, FactorizedLayer):
        old_u, old_v = (full_tensor(part.detach()).to(u.device) for part in (before.scaled_u, before.v))
        return torch.cat([u, -old_u], dim=1), torch.cat([v, old_v], dim=1)
    assert isinstance(before.weight, Tensor)
    dense = full_tensor(before.weight.detach()).to(u.device)
    difference = u.double() @ v.double().mT - dense.double().flatten(1)
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
