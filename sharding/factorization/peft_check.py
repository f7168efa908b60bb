"""Check that PEFT applies an exported adapter as it is meant.

PEFT adapts a layer by a wrapper around it. Three kinds of models lose an adapter by that, most of them silently: a
forward pass that reads `layer.weight` and never calls the layer, one that reads an attribute that the wrapper lacks,
and models whose layers PEFT renames or refuses.
"""

import warnings
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sharding.errors import UserError, join_first
from sharding.layers.base import factorized_layers
from sharding.modules.copies import copied, meta_copy, replace_modules
from sharding.modules.wrappers import without_wrappers

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]


def check_loaded(start: nn.Module, folder: Path, names: Collection[str]) -> None:
    """Raise a UserError if PEFT, where installed, refuses an adapter or leaves out a layer of these names."""
    if find_spec("peft") is None:
        return
    adapted = _load(_dense(meta_copy(start)), folder)
    reached = {name for name, part in adapted.named_modules() if hasattr(part, "lora_A")}
    if missing := [name for name in names if f"base_model.model.{name}" not in reached]:
        raise UserError(
            f"PEFT would leave {len(missing)} layers of this {type(start).__name__} as they are: "
            f"{join_first(missing)}; keep them dense with skip=[…], or use save_factorized"
        )


@torch.no_grad()
def check_outputs(model: nn.Module, start: nn.Module, folder: Path, batch: Batch) -> None:
    """Raise a UserError if the dense model with an adapter computes other outputs of a batch than the factorized model.

    More than rounding counts, and so does an error of PEFT's model. Raise an ImportError without PEFT.
    """
    if find_spec("peft") is None:
        raise ImportError("export_lora compares outputs with the package peft: pip install peft")
    base = _dense(copied(start)).eval()
    expected, before = _outputs(copied(model).eval(), batch), _outputs(base, batch)
    try:
        after = _outputs(_load(base, folder).eval(), batch)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"PEFT's model of this {type(start).__name__} raises {type(error).__name__}: {error}"
        ) from error
    for ours, theirs, dense in zip(expected, after, before, strict=True):
        gap, effect = _distance(ours, theirs), _distance(ours, dense)
        if not gap <= 1e-4 * effect + 100 * torch.finfo(ours.dtype).eps * float(ours.abs().max()):
            raise UserError(
                f"with this adapter, PEFT's outputs differ from those of the factorized model by {gap:.2g}, where the "
                f"adapter changes them by {effect:.2g}: some forward pass in this {type(start).__name__} reads a "
                "layer's weight and does not call the layer; keep it dense with skip=[…], or use save_factorized"
            )


def _dense(model: nn.Module) -> nn.Module:
    """Replace the factorized layers of a copy by dense ones, without wrappers; what was unpacked stays so."""
    model = without_wrappers(model)
    return replace_modules(model, {id(layer): layer.to_dense() for layer in factorized_layers(model).values()})


def _load(base: nn.Module, folder: Path) -> nn.Module:
    import peft  # noqa: PLC0415 - heavy, and not everybody has it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return peft.PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=True)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"PEFT cannot load this adapter of a {type(base).__name__}: {error}") from error


def _outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the floating-point tensors of a model's output."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple) else model(batch)
    return [part for part in tree_leaves(output) if isinstance(part, Tensor) and part.is_floating_point()]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
