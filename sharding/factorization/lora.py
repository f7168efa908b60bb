"""What training made of factorized layers, as a LoRA adapter in PEFT's form.

The change of a layer, U'Ω'V'ᵀ − UΩVᵀ, has rank 2n at most: it is an adapter with B = [U'Ω', −UΩ] and A = [V', V]ᵀ. On
the model that the terms came from the adapter adds what was learned, and the terms that were not kept stay. From the
dense model itself the whole difference to the factorized one is taken; the adapter then turns the one into the other,
and its rank is what that needs.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.layers import FactorizedEmbedding, FactorizedLayer, FactorizedLinear
from sharding.layers.conv import FactorizedConv
from sharding.layers.linear import FactorizedTransposedLinear
from sharding.modules.wrappers import unwrap

KINDS = (FactorizedLinear, FactorizedTransposedLinear, FactorizedEmbedding, FactorizedConv)


def export_lora(model: nn.Module, start: nn.Module, folder: str | Path) -> None:
    """Write the change of a model's factorized layers as an adapter that `peft.PeftModel.from_pretrained` loads.

    Args:
        model: the factorized model, trained.
        start: what it started from: the factorized model before training, or the dense one.
        folder: where to write ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        UserError: PEFT has no form for a layer (convolutions that are transposed, dilated or grouped, or pad with
            other than zeros), `init` lacks it (parts of what was unpacked or split in the dense model), something
            else than factorized layers differs, or the folder holds an adapter already.
    """
    model, start, folder = unwrap(model), unwrap(start), Path(folder)
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds an adapter already; choose another folder or remove it")
    layers = {name: part for name, part in model.named_modules() if isinstance(part, FactorizedLayer)}
    _check(model, start, layers)
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
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _check(model: nn.Module, start: nn.Module, layers: Mapping[str, FactorizedLayer]) -> None:
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
    others = dict(start.named_parameters()) | dict(start.named_buffers())
    inside = tuple(f"{name}." for name in layers)
    state = [*model.named_parameters(), *model.named_buffers()]
    problems += [
        f"{name} has changed as well, and an adapter holds factorized weights alone"
        for name, part in state
        if (not name.startswith(inside) or name.endswith(".bias"))
        and not name.endswith(".num_batches_tracked")
        and not (name in others and torch.equal(others[name], part))
    ]
    if problems:
        raise UserError(f"cannot export an adapter: {'; '.join(problems)}")


def _formless(layer: FactorizedLayer) -> str | None:
    """Say what a layer is that PEFT has no adapter for, or None if it has one."""
    kind = f"a {type(layer).__name__}"
    if not isinstance(layer, KINDS):
        return kind
    if isinstance(layer, FactorizedConv) and set(layer.dilation) != {1}:  # PEFT's convolutions are not dilated
        return f"{kind} with dilation"
    if isinstance(layer, FactorizedConv) and layer.num_blocks > 1:  # PEFT cannot merge them
        return f"{kind} with groups"
    if isinstance(layer, FactorizedConv) and layer.padding_mode != "zeros":
        return f"{kind} with padding_mode {layer.padding_mode!r}"
    return None


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
    b, a = left[:, :rank] * root, right[:rank].mT * root
    return b.to(dense.dtype), a.to(dense.dtype)


def _shaped(layer: FactorizedLayer, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B in the shapes that PEFT has for this kind of layer; the first axis of A counts the rank."""
    if isinstance(layer, FactorizedTransposedLinear | FactorizedEmbedding):
        return b.mT, a
    if isinstance(layer, FactorizedConv):
        ones = [1] * len(layer.kernel_size)
        return a.mT.reshape(-1, layer.in_channels, *layer.kernel_size), b.view(*b.shape, *ones)
    return a.mT, b
