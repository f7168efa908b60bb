"""The models of the experiments, by name."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from sharding.errors import UserError, lookup, safe_repr

__all__ = ["MODELS", "build_model", "load_pretrained"]

# The builder of a model, or its dotted name, imported on demand: a run needs one of them.
MODELS: dict[str, str | Callable[..., nn.Module]] = {
    "resnet18_gn": "models.resnet.ResNetGN",
    "cct_6_3x2": "models.cct.CCT",
    "gpt_tiny": "models.gpt.GPT",
    "gru": "models.gru.GRU",
    "mlp": "models.small.MLP",
    "cnn": "models.small.CNN",
    "transformers": "models.pretrained.build_transformer",
    "timm": "models.pretrained.build_timm",
}
# What loads pretrained weights into such a model; a file of named tensors is loaded into all others.
LOADERS = {"transformers": "models.pretrained.load_transformer", "timm": "models.pretrained.load_timm"}


def build_model(name: str, *, input_shape: tuple[int, ...], num_classes: int, **options: object) -> nn.Module:
    """Build a model for a dataset; only torch's global generator decides its initial weights.

    Args:
        name: a key of `MODELS`.
        input_shape: shape of one input without the batch: (channels, height, width), or (length,) for text.
        num_classes: number of classes, or of token ids.
        options: the model's own keyword-only arguments (`width`, `depth`, …).

    Raises:
        UserError: an unknown model, an option out of range, an input that the model cannot read, or what is built is no
            module.
    """
    build = lookup(MODELS, name, "model")
    model = (_import(build) if isinstance(build, str) else build)(input_shape, num_classes, **options)
    if not isinstance(model, nn.Module):
        raise UserError(f"the model {name} is {safe_repr(model)}; its function must return an nn.Module")
    return model


def load_pretrained(name: str, model: nn.Module, weights: str) -> None:
    """Load pretrained weights into a model, in place, and log what was loaded and what is new.

    Args:
        name: a key of `MODELS`.
        model: a model that `build_model` has built.
        weights: a file of named tensors; for `transformers` a folder or an id on the hub; for `timm` a file or `hub`.

    Raises:
        UserError: the weights cannot be read, or are of another model.
    """
    _import(LOADERS.get(name, "models.pretrained.load_weights"))(model, weights)


def _import(path: str) -> Callable[..., Any]:
    module, _, attribute = path.rpartition(".")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function
