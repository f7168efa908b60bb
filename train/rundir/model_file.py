"""A trained model on disk: dense weights, and the sizes needed to rebuild the model without the data."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from models import build_model
from models.pretrained import config_of
from sharding import merge
from sharding.errors import UserError
from sharding.layers import FactorizedLayer
from train.config.schema import Config
from train.experiment.experiment import Experiment
from train.rundir.checkpoint import cpu_copies, metadata_of
from train.rundir.directory import check_regular, config_in
from train.rundir.file_names import BEST_FILE, CONFIG_FILE, MODEL_FILE
from train.utils.files import write_atomically

KEY = "model"
SLACK = 10  # times the file's size that a model may take while it is built


def save_model(path: Path, model: nn.Module, rounds: int, experiments: Iterable[Experiment]) -> None:
    """Write the dense weights of a run's model, or of several as one module, with what `read_model` needs to build it.

    Raise a RunError if the disk is full or not writable.
    """
    sizes = {
        one.config.name: {
            "input_shape": one.dataset.input_shape,
            "num_classes": one.dataset.num_classes,
            "class_names": one.dataset.class_names,
            "config": config_of(one.model),
        }
        for one in experiments
    }
    if any(isinstance(part, FactorizedLayer) for part in model.modules()):
        model = merge(model)
    state = cpu_copies(model.state_dict())
    write_atomically(path, safetensors.torch.save(state, {KEY: json.dumps({"rounds": rounds, "sizes": sizes})}))


def read_model(directory: Path | str, best: bool = False) -> nn.Module:
    """Load a model, see `train.load_model`."""
    check_regular(Path(directory))
    config, path = config_in(Path(directory)), Path(directory) / (BEST_FILE if best else MODEL_FILE)
    if not path.exists():
        raise UserError(f"{path} does not exist; the run writes it when it ends: resume the run with --resume")
    try:
        sizes = metadata_of(path, KEY)["sizes"]
        with _no_larger_than(path):
            model = _build(config, sizes)
        model.load_state_dict(safetensors.torch.load_file(path))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        reason = f"it is damaged, or of another model ({error})"
        raise UserError(f"cannot load {path}: {reason}; train again with another output=…") from error
    return model.eval()


@contextmanager
def _no_larger_than(path: Path) -> Iterator[None]:
    """Raise a ValueError for a model whose tensors take far more bytes than a file has: it may come from anywhere.

    A model may share some or replace some while it is built.
    """
    file_nbytes, model_nbytes = path.stat().st_size, 0

    def count(_: nn.Module, __: str, tensor: torch.Tensor | None) -> None:
        nonlocal model_nbytes
        model_nbytes += 0 if tensor is None or is_lazy(tensor) else tensor.nbytes
        if model_nbytes > SLACK * (file_nbytes + 2**20):
            raise ValueError(
                f"the model of {CONFIG_FILE} takes more than {model_nbytes:,} bytes, and the file has {file_nbytes:,}"
            )

    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _build(config: Config, sizes: Mapping[str, Any]) -> nn.Module:
    """Build the model with random weights, without a change to torch's global generator, and name its classes."""
    models: dict[str, nn.Module] = {}
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
        for one in config.models():
            options, known = one.model.options, sizes[one.name]
            if known["config"] is not None:  # the folder of the pretrained weights may be gone
                (Path(folder) / "config.json").write_text(json.dumps(known["config"]), encoding="utf-8")
                options["weights"] = folder
            shape, count = tuple(known["input_shape"]), known["num_classes"]
            models[one.name] = build_model(one.model.name, input_shape=shape, num_classes=count, **options)
            models[one.name].class_names = tuple(known["class_names"])  # type: ignore[assignment]  # of no module
    return nn.ModuleDict(models) if config.tasks else models[config.name]
