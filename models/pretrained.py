"""Pretrained models: Hugging Face's transformers and timm's image models, and weights of a file for any model.

What was loaded is logged: how many tensors, which of the model's have no values in the file and start at random, such
as the head for other classes, and which of the file the model does not have.
"""

import json
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from models.hub import read_config, reading, reads_last, refuse_url
from sharding.errors import UserError, join_first
from sharding.rounds.failures import one_line

log = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


class Transformer(nn.Module):
    """A model of transformers that maps token ids to logits.

    Args:
        model: a model with a head, as transformers' Auto classes make it.
        pad_token_id: the id that pads texts, which are then masked; None where nothing is padded.
    """

    def __init__(self, model: nn.Module, pad_token_id: int | None) -> None:
        super().__init__()
        self.model = model
        self.pad_token_id = pad_token_id
        # Padding on the left moves the tokens, and XLM and Flaubert count positions from the left.
        self._counts_tokens = reads_last(model.config) and "position_ids" in signature(model.forward).parameters

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (batch, length) to logits (batch, classes) or (batch, length, vocabulary)."""
        mask = None if self.pad_token_id is None else (ids != self.pad_token_id).long()
        positions: dict[str, Tensor] = {}
        if mask is not None and self._counts_tokens:
            positions["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, **positions).logits
        return logits


TASKS = {"sequence_classification": "AutoModelForSequenceClassification", "causal_lm": "AutoModelForCausalLM"}


def build_transformer(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    weights: str | None = None,
    task: Literal["sequence_classification", "causal_lm"] = "sequence_classification",
    train_embeddings: bool = False,
    pad_token_id: int | None = None,
    class_names: tuple[str, ...] | None = None,
) -> Transformer:
    """Build a model of transformers, in float32, with frozen embeddings.

    A language model's output layer counts as one. A model that can read in both directions, as BERT, becomes a decoder
    for `causal_lm`.

    Args:
        input_shape: (length,) of token ids.
        num_classes: number of classes, or of token ids.
        weights: folder of the model, as `save_pretrained` writes it, or its id on the Hugging Face hub. Only its
            `config.json` is read here; `load_transformer` loads the weights.
        task: the task of the model's head.
        train_embeddings: also train these, which are then sent in every round.
        pad_token_id: the id that pads texts; by default the dataset's, else that of `config.json`.
        class_names: `id2label` of the model's configuration; by default the dataset's.

    Raises:
        ImportError: transformers is not installed.
        UserError: the folder has no such model, the texts are longer than the model can read, or it finds their
            positions by another id of padding.
    """
    transformers = _import("transformers")
    if weights is None:
        raise UserError("transformers needs weights=…, a folder or an id on the Hugging Face hub")
    if len(input_shape) != 1:
        raise UserError(f"the model transformers reads token ids (length,), not inputs of shape {input_shape}")
    what = f"weights={weights} for {task}"
    config = read_config(weights, what)
    own_pad, ends = config.pad_token_id, config.eos_token_id
    pads = (pad_token_id, own_pad, ends[0] if isinstance(ends, list) else ends)
    config.pad_token_id = next((id for id in pads if id is not None), None)
    if task == "sequence_classification":
        config.num_labels = num_classes
        if class_names:
            config.id2label = dict(enumerate(class_names))
            config.label2id = {name: number for number, name in enumerate(class_names)}
    elif hasattr(config, "is_decoder"):
        config.is_decoder = True
    with reading(weights, what):
        auto = getattr(transformers, TASKS[task])
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    longest, counts_from_pad = _num_positions(model)
    if longest is not None and input_shape[0] > longest:
        raise UserError(f"data.max_length={input_shape[0]} must be at most {longest}, the model's positions")
    if counts_from_pad and None not in (pad_token_id, own_pad) and pad_token_id != own_pad:
        raise UserError(
            f"the tokenizer pads with the id {pad_token_id}, and weights={weights} with {own_pad}, from which the "
            "model counts positions; name the model's own tokenizer"
        )
    _freeze_embeddings(model, train_embeddings)
    return Transformer(model, config.pad_token_id if task == "sequence_classification" else None)


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return what transformers needs to build a model again, as in its `config.json`; None for other models."""
    if not isinstance(model, Transformer):
        return None
    config: Any = model.model.config
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def load_transformer(model: nn.Module, weights: str) -> None:
    """Load weights of a folder or the hub into a model of `build_transformer`, or raise a UserError."""
    assert isinstance(model, Transformer)
    built, embeddings = model.model, [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    with reading(weights, f"weights={weights} for {type(built).__name__}"):
        loaded, report = type(built).from_pretrained(  # type: ignore[attr-defined]  # of transformers' base class
            weights, config=built.config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    _freeze_embeddings(loaded, any(layer.weight.requires_grad for layer in embeddings))
    model.model = loaded
    other = sorted(entry[0] if isinstance(entry, tuple) else entry for entry in report["mismatched_keys"])
    new = sorted({*report["missing_keys"]} - {*other})
    count = len(loaded.state_dict()) - len(new) - len(other)
    if count == 0:
        raise UserError(f"weights={weights} has no tensor of a {type(built).__name__}; give another folder")
    _tell(weights, count, new, other, sorted(report["unexpected_keys"]))


def build_timm(
    input_shape: tuple[int, ...], num_classes: int, *, architecture: str, image_size: int | None = None
) -> nn.Module:
    """Build an image model of timm, with random weights.

    Args:
        input_shape: (channels, height, width).
        num_classes: number of classes.
        architecture: a name in `timm.list_models()`, with the tag of the weights if they are timm's.
        image_size: height and width, for models that know them, such as vision transformers.

    Raises:
        ImportError: timm is not installed.
        UserError: it has no such model for these images.
    """
    images = {"in_chans": input_shape[0]} | ({} if image_size is None else {"img_size": image_size})
    model = _create_timm(f"make architecture={architecture}", architecture, **images, num_classes=num_classes)
    model.images = images  # type: ignore[assignment]  # for `load_timm`
    return model


def load_timm(model: nn.Module, weights: str) -> None:
    """Load timm's own weights of the model's architecture (`hub`), or those of a file.

    timm resamples position embeddings for another size of images, and sums or repeats the first layer's weights for
    another number of channels.

    Raises:
        UserError: they cannot be read, or are of another model.
    """
    config: Any = model.pretrained_cfg
    architecture = f"{config['architecture']}.{config['tag']}" if config["tag"] else config["architecture"]
    options: dict[str, Any] = dict(model.images)  # type: ignore[arg-type]  # of `build_timm`
    if weights != "hub":
        values = dict(_read_tensors(Path(weights)))
        head, first = (_first(config[key]) for key in ("classifier", "first_conv"))
        classes = values.get(f"{head}.weight", torch.empty(0)).shape[0]
        stem = values.get(f"{first}.weight", torch.empty(0, 3))
        options["num_classes"] = classes
        overlay = {"num_classes": classes, "label_offset": 0, "input_size": (stem.shape[1], *config["input_size"][1:])}
        options["pretrained_cfg_overlay"] = {"state_dict": values, **overlay}
    pretrained = _create_timm(f"load weights={weights}", architecture, **options, pretrained=True)
    load_state(model, pretrained.state_dict(), architecture if weights == "hub" else weights)


def _first(names: str | Sequence[str] | None) -> str | None:
    return names if names is None or isinstance(names, str) else names[0]


def load_weights(model: nn.Module, weights: str) -> None:
    """Load what fits into a model, in place, from a file of safetensors, or of `torch.save` with tensors only.

    Raise a UserError if the file cannot be read, or is of another model.
    """
    load_state(model, _read_tensors(Path(weights)), weights)


def load_state(model: nn.Module, values: Mapping[str, Tensor], source: str) -> None:
    """Load the tensors that fit, and log what does not; raise a UserError if most parameters have no value."""
    state, parameters = model.state_dict(), dict(model.named_parameters())
    fitting = {name: value for name, value in values.items() if name in state and state[name].shape == value.shape}
    other = [name for name in values if name in state and name not in fitting]
    new, unused = [name for name in state if name not in values], [name for name in values if name not in state]
    loaded = sum(parameters[name].numel() for name in fitting if name in parameters)
    if loaded * 2 < sum(part.numel() for part in parameters.values()):
        raise UserError(
            f"weights={source} is of another model: {len(fitting)} of its {len(values)} tensors fit. It has "
            f"{join_first(list(values))}; the model has {join_first(list(state))}"
        )
    model.load_state_dict(fitting, strict=False)
    _tell(source, len(fitting), new, other, unused)


def _read_tensors(path: Path) -> Mapping[str, Tensor]:
    refuse_url(path, "weights")
    if path.suffix not in SUFFIXES:
        raise UserError(f"weights={path} is no file of weights; its name ends in one of {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # timm's checkpoints have their arguments
            values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # readers raise many kinds of errors
        raise UserError(f"weights={path} cannot be read: {one_line(error) or type(error).__name__}") from error
    for key in ("state_dict", "model"):
        values = values[key] if isinstance(values, dict) and isinstance(values.get(key), dict) else values
    if isinstance(values, dict) and all(
        str(name).startswith("module.") for name in values
    ):  # of DistributedDataParallel
        values = {name.removeprefix("module."): value for name, value in values.items()}
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise UserError(f"weights={path} holds a {type(values).__name__}, not named tensors (model.state_dict())")
    return values


def _tell(source: object, loaded: int, new: Sequence[str], other: Sequence[str], unused: Sequence[str]) -> None:
    told = [f"loaded {loaded} tensors of {source}"]
    told += [f"new: {join_first(list(new))}"] if new else []
    told += [f"of another shape, so new: {join_first(list(other))}"] if other else []
    told += [f"not in the model: {join_first(list(unused))}"] if unused else []
    log.info("%s", "; ".join(told))


def _create_timm(what: str, architecture: str, **options: Any) -> nn.Module:
    try:
        model: nn.Module = _import("timm").create_model(architecture, **options)
    except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"timm cannot {what}: {one_line(error)}") from error
    return model


def _num_positions(model: Any) -> tuple[int | None, bool]:
    """Return the length of the longest text that a model of transformers can read, or None for any length.

    And whether it counts positions from the id of padding.
    """
    positions: int = getattr(model.config, "max_position_embeddings", None) or 0
    counts_from_pad = False
    for name, layer in model.named_modules():
        if name.endswith("position_embeddings") and getattr(layer, "padding_idx", None) is not None:
            positions = layer.num_embeddings - layer.padding_idx - 1  # RoBERTa and others count from padding_idx + 1
            counts_from_pad = True
    return (positions if positions > 0 else None), counts_from_pad  # XLNet says -1


def _freeze_embeddings(model: Any, train: bool) -> None:
    output = model.get_output_embeddings()  # of a language model
    embeddings = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    for layer in (*embeddings, *([] if output is None else [output])):
        layer.requires_grad_(train)


def _import(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(f"the model {package} needs a package: pip install {package} ({error})") from error
