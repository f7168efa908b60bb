"""Putting factorized layers in the place of dense ones, and undoing it."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from math import ceil

import torch
from torch import nn

from sharding.errors import UserError
from sharding.factorization.choose import ENDS, as_patterns, rank_of, shardable_layers
from sharding.factorization.report import Report
from sharding.layers import FactorizedLayer, UnpackedAttention, dense_types, factorized_type


def num_terms(rank: int, keep_ratio: float) -> int:
    """Return n = ⌈N·r⌉, the singular terms that keep ratio r in (0, 1] affords of a layer of rank N.

    Raises:
        UserError: the keep ratio is outside (0, 1].
    """
    if not 0 < keep_ratio <= 1:
        raise UserError(f"keep ratio {keep_ratio} is outside (0, 1]; 0.2 keeps a fifth of each layer's singular terms")
    return ceil(rank * keep_ratio * (1 - 1e-7))  # 10·0.3 is 3.0000000000000004, and 0.2 in float32 is above 0.2


def factorize(
    model: nn.Module, keep_ratio: float, skip: str | Iterable[str] = ENDS, inplace: bool = False
) -> nn.Module:
    """Replace every affine layer by its ⌈N·r⌉ largest singular terms, and say what was done.

    Args:
        model: any module; it is left as it was unless `inplace`.
        keep_ratio: r in (0, 1].
        skip: layers to leave whole, see `shardable_layers`; by default the first and the last.
        inplace: change `model` itself instead of a copy.

    Returns:
        The model, with a `Report` of what was replaced as `model.factorize_report`.

    Raises:
        UserError: keep ratio outside (0, 1], a pattern that matches nothing, or a layer that cannot be factorized.
    """
    skip = as_patterns(skip)
    num_terms(1, keep_ratio)  # all that can be wrong is found before anything is changed
    names = list(shardable_layers(unpack_attention(model) if _has_packed_attention(model) else model, skip))
    report = Report(parameters_before=_count_parameters(model))
    model = unpack_attention(model, inplace)

    def replace(name: str, layer: nn.Module) -> nn.Module:
        if name not in names:
            if isinstance(layer, dense_types()):
                report.whole[name] = f"skip={list(skip)}" if rank_of(layer) > 1 else "a single term"
            return layer
        rank = rank_of(layer)
        report.replaced[name] = rank, num_terms(rank, keep_ratio)
        try:
            return _factorized_type(name, layer).from_dense(layer, num_terms(rank, keep_ratio))
        except UserError as error:
            raise UserError(f"layer {name}: {error}") from error

    model = _replace_modules(model, replace)
    report.parameters_after = _count_parameters(model)
    model.factorize_report = report  # type: ignore[assignment]  # a plain attribute, not a submodule
    return model


def factorize_empty(
    model: nn.Module,
    terms: Mapping[str, int],
    device: torch.device | str | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Put a factorized layer without values in the place of each layer named, by its name and number of terms.

    Nothing is decomposed, and where the model is on the `meta` device no dense weight is ever made.

    Args:
        model: any module; it is left as it was unless `inplace`.
        terms: n by layer.
        device: where the factorized layers are made; by default where the dense ones are.
        inplace: change `model` itself instead of a copy.

    Raises:
        UserError: a name is no layer that can be factorized, or a number of terms is outside 1…N.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in terms if name not in layers]
    if missing:
        raise UserError(f"the model has no layer {', '.join(missing)}")
    empty = {
        id(layers[name]): _factorized_type(name, layers[name]).empty_like(layers[name], n, device)
        for name, n in terms.items()
    }
    if inplace:
        return _replace_modules(model, lambda _, part: empty.get(id(part), part))
    return deepcopy(model, dict[int, object](empty))  # so no dense weight is copied only to be dropped


def merge(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Undo `factorize`: put the ordinary layer with weight UΩVᵀ for every factorized one, and pack attention again."""
    model = model if inplace else deepcopy(model)
    model = _replace_modules(model, lambda _, part: part.to_dense() if isinstance(part, FactorizedLayer) else part)
    model = _replace_modules(model, lambda _, part: part.to_packed() if isinstance(part, UnpackedAttention) else part)
    if hasattr(model, "factorize_report"):
        del model.factorize_report
    return model


def unpack_attention(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Replace every `nn.MultiheadAttention` by one whose projections are layers, so that they can be sharded.

    `factorize` does this by itself; a server's model that has such attention needs it before it goes to `ShardPlanner`.

    Raises:
        UserError: an attention with add_bias_kv or add_zero_attn.
    """
    model = model if inplace else deepcopy(model)
    return _replace_modules(
        model,
        lambda _, layer: UnpackedAttention.from_packed(layer) if isinstance(layer, nn.MultiheadAttention) else layer,
    )


def _has_packed_attention(model: nn.Module) -> bool:
    return any(isinstance(module, nn.MultiheadAttention) for module in model.modules())


def _replace_modules(model: nn.Module, replace: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Put `replace(name, module)` in the place of each module, once for a module that is registered several times."""
    replacements = {id(module): replace(name, module) for name, module in list(model.named_modules())}
    for parent in list(model.modules()):
        # Not `named_children`, which tells a child that one parent registers twice only once.
        for name, module in parent._modules.items():
            if module is not None:
                parent._modules[name] = replacements[id(module)]
    return replacements[id(model)]


def _factorized_type(name: str, layer: nn.Module) -> type[FactorizedLayer]:
    kind = factorized_type(layer)
    if kind is None:
        raise UserError(f"layer {name} is a {type(layer).__name__}, which has no factorized form")
    return kind


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
