"""Save a factorized model in a folder: its tensors in safetensors, its structure in JSON.

The folder records which layers are factorized, with how many terms and which residual, and what was unpacked.
`load_factorized` rebuilds the model from the folder and the dense model's structure, without a dense weight or an SVD.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.factorization.support import TO_BUILD, TO_SAVE, check_supported
from sharding.factorization.unpack import unpack
from sharding.layers import UnpackedAttention
from sharding.layers.base import factorized_layers, residual_layers
from sharding.layers.registry import factorize_empty
from sharding.matrices.quantization import Format, format_of
from sharding.modules.copies import check_has_values, fill, meta_copy
from sharding.modules.wrappers import full_tensor, is_distributed, named_modules, named_state, unwrap
from sharding.validation import typed

FORMAT = 1
TENSORS, CONFIG = "model.safetensors", "factorization.json"


@typed
def save_factorized(model: nn.Module, folder: str | Path) -> None:
    """Write a factorized model to a folder, which is created if necessary.

    Tied tensors are written once. For a Hugging Face model, use this function instead of `save_pretrained`, since
    `from_pretrained` builds dense layers and leaves them random where it finds factors. To write an ordinary
    checkpoint, call ``merge(model).save_pretrained(folder)``. A model that FSDP2 holds in pieces is gathered: call the
    function on every process, and the first one writes.

    Raises:
        UserError: the folder already holds a model, or the model has extra state (`get_extra_state`) or a tensor of a
            kind that safetensors lacks, or a factor that is computed, or a layer has a tail; or it cannot be a folder.
    """
    model, folder = unwrap(model), Path(folder)
    if (folder / CONFIG).exists() or (folder / TENSORS).exists():
        raise UserError(f"{folder} holds a model already; choose another folder or remove it")
    check_supported(model, TO_SAVE)
    slots, layers = named_state(model), factorized_layers(model)
    names = _first_names(slots)
    config = {
        "format": FORMAT,
        "layers": {name: layer.num_terms for name, layer in layers.items()},
        "unpacked": [name for name, part in named_modules(model) if isinstance(part, UnpackedAttention)],
        "residuals": {name: format_of(residual) for name, residual in residual_layers(model).items()},
    }
    tensors = {name: full_tensor(slots[name].detach()).cpu().contiguous().clone() for name in names}
    if any(map(is_distributed, slots.values())) and dist.get_rank() != 0:
        return
    make_folder(folder)
    save_file(tensors, folder / f"{TENSORS}.part")
    (folder / f"{CONFIG}.part").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in (TENSORS, CONFIG):  # atomic
        os.replace(folder / f"{name}.part", folder / name)


def make_folder(folder: Path) -> None:
    """Make a folder and those around it; it may be there. Raise a UserError if one of them is a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} cannot be a folder: {error.strerror}; choose another one") from error


@typed
def load_factorized(folder: str | Path, model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Load the factorized model from a folder that `save_factorized` wrote.

    Args:
        folder: the folder of the saved model.
        model: the structure of the dense model: built in `with sharding.init_empty():`, on the `meta` device, or with
            values. It is not changed, and its weights are not copied.
        device: the device of the loaded tensors.

    Raises:
        UserError: the folder holds no model or one of another format, or its names and shapes differ from those of
            `model`; the message lists every difference.
    """
    check_supported(model, TO_BUILD)
    config, tensors = _read(Path(folder))
    small = _structure(meta_copy(model), config, folder)
    slots = named_state(small)
    names = _first_names(slots)
    problems = [
        *(f"{name} is not in the folder" for name in names if name not in tensors),
        *(f"{name} is not in the model" for name in tensors if name not in names),
        *(
            f"{name} has shape {list(tensor.shape)} in the folder, {list(slots[name].shape)} in the model"
            for name, tensor in tensors.items()
            if name in names and tensor.shape != slots[name].shape
        ),
        *(
            f"{name} is {tensor.dtype} in the folder, {slots[name].dtype} in the model"
            for name, tensor in tensors.items()
            if name in names and _number_kind(tensor) != _number_kind(slots[name])
        ),
    ]
    if problems:
        raise UserError(f"{folder} does not fit this {type(model).__name__}: {'; '.join(problems)}")
    fill(small, {id(slots[name]): tensors[name].to(device) for name in names})
    check_has_values(small, folder)
    return small.to(device)  # buffers that are not in the folder


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"{folder} holds no factorized model: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        version = config.get("format") if isinstance(config, dict) else None
        raise UserError(
            f"{folder} is of format {version}, and this version reads {FORMAT}; save it again with this one"
        )
    if not _is_structure(config):
        raise UserError(f"{folder} holds no factorized model: {CONFIG} is damaged")
    return config, tensors


def _is_structure(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has layers with terms, residuals, and unpacked layers."""
    layers, unpacked, residuals = (config.get(part) for part in ("layers", "unpacked", "residuals"))
    if not (isinstance(layers, dict) and isinstance(unpacked, list) and isinstance(residuals, dict)):
        return False
    formats, numbers = all(kind in get_args(Format) for kind in residuals.values()), layers.values()
    return formats and all(isinstance(name, str) for name in unpacked) and all(type(n) is int for n in numbers)


def _number_kind(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor is real and whether it is complex; integers and masks are neither."""
    return tensor.is_floating_point(), tensor.is_complex()


def _structure(model: nn.Module, config: Mapping[str, Any], folder: str | Path) -> nn.Module:
    """Unpack and factorize an empty model as the configuration states, in place."""
    inside = tuple(f"{name}." if name else "" for name in config["unpacked"])
    modules = dict(named_modules(model))
    missing = [name for name in config["unpacked"] if name not in modules]
    missing += [name for name in config["layers"] if name not in modules and not name.startswith(inside)]
    problems = [f"the model has no {', '.join(missing)}"] if missing else []
    problems += [
        f"{name} is a {type(modules[name]).__name__}, not an nn.MultiheadAttention"
        for name in config["unpacked"]
        if name in modules and not isinstance(modules[name], nn.MultiheadAttention)
    ]
    if problems:
        raise UserError(f"{folder} does not fit this {type(model).__name__}: {'; '.join(problems)}")
    model = unpack(model, config["unpacked"])
    return factorize_empty(model, config["layers"], config["residuals"])


def _first_names(slots: Mapping[str, Any]) -> list[str]:
    """Return the names of a state; a tied tensor has only its first name."""
    first: dict[int, str] = {}
    for name, slot in slots.items():
        first.setdefault(id(slot), name)
    return list(first.values())
