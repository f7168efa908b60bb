"""Replace dense layers by factorized ones, and back."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from sharding.errors import UserError
from sharding.factorization.calibration import Batch, observe
from sharding.factorization.report import (
    FactorizationReport,
    LayerReport,
    count_parameters,
    reasons,
    uncovered,
    warn_if_little,
)
from sharding.factorization.shardable import ENDS, Patterns, as_patterns, packed_attention, sort_layers
from sharding.factorization.support import TO_MERGE, TO_REPLACE, check_supported
from sharding.factorization.terms import Cost, KeepRatio, check_keep_ratio, count_terms
from sharding.factorization.unpack import pack, unpack
from sharding.layers.base import factorized_layers
from sharding.layers.registry import factorized_kind
from sharding.matrices.quantization import Format, check_format
from sharding.matrices.values import find_nonfinite
from sharding.modules.copies import copied, replace_modules, tensors
from sharding.modules.wrappers import get_submodule
from sharding.validation import typed


@typed
def factorize(
    model: nn.Module,
    keep_ratio: KeepRatio,
    skip: Patterns = ENDS,
    inplace: bool = False,
    *,
    also: Patterns = (),
    residual_format: Format | None = None,
    calibration: Iterable[Batch] | None = None,
) -> nn.Module:
    """Replace every affine layer by its ⌈N·r⌉ largest singular terms, on top of a frozen residual if asked.

    Layers that cannot be factorized stay dense. So do layers that would grow, unless r is 1, which keeps all terms.

    Args:
        model: any module; it is not changed unless `inplace`.
        keep_ratio: r in (0, 1]; or ratios by pattern, of which the first match counts, and layers without a match stay
            dense; or an `Energy` that each layer keeps; or a `Budget` for the whole model.
        skip: layers to keep dense, see `shardable_layers`; by default the first and the last.
        inplace: change `model` itself instead of a copy. A model that is a single layer is replaced; use the result.
            Make the optimizer afterwards: an earlier one would train the old weights.
        also: layers to factorize that stay dense by default, as embeddings do (``also=nn.Embedding``).
        residual_format: keep the rest of each weight, frozen, as ``int4``, ``int8``, ``bfloat16`` or ``float32``; see
            `sharding.matrices.quantization`. The model then computes what it did, up to rounding, and only the terms
            train. None drops the rest.
        calibration: batches of inputs (as for `sharding.train_shard`; targets are ignored). The terms of each layer are
            then those that keep its outputs on these inputs, see `sharding.matrices.activations`. An `Energy` or a
            `Budget` still counts the terms of the weights.

    Returns:
        The model, with a `FactorizationReport` in its attribute ``factorize_report``.

    Raises:
        UserError: a keep ratio outside (0, 1], a pattern that matches nothing, a weight that is not finite, a budget
            that is too small, an unknown residual or a layer that adds none, or calibration without batches or values.
            The model is unchanged then.

    Warns:
        CoverageWarning: nothing was factorized, or less than half of what was not skipped.
    """
    check_keep_ratio(keep_ratio)
    if residual_format is not None:
        check_format(residual_format, "residual_format")
    check_supported(model, TO_REPLACE)
    skip = as_patterns(skip)
    packed = packed_attention(model, skip)
    with torch.inference_mode(False), torch.no_grad():  # the result can train, in whatever mode it is made
        shared = copied(model, {id(tensor): tensor for tensor in tensors(model)})  # other modules with the same tensors
        copy = unpack(shared, packed)  # every error is found before anything is changed
        layers = sort_layers(copy, skip, also)
        _check_finite(layers.shardable)
        elsewhere = count_parameters(copy) - sum(Cost.of(layer).dense for layer in layers.shardable.values())
        terms = count_terms(copy, layers.shardable, keep_ratio, elsewhere)

        unfactorized = reasons(layers, terms, skip)
        kept = {name: n for name, n in terms.items() if isinstance(n, int)}
        dense = {name: layers.shardable[name] for name in kept}
        report = FactorizationReport(
            unfactorized=unfactorized,
            uncovered=uncovered(copy, dense, unfactorized),
            parameters_before=count_parameters(model),
        )
        kinds = {name: factorized_kind(name, layer, residual_format) for name, layer in dense.items()}
        moments = {} if calibration is None else observe(copy, dense, calibration)
        target = unpack(model, packed) if inplace else copy
        old = {name: get_submodule(target, name) for name in kept}
        new = {
            name: kinds[name].from_dense(layer, kept[name], residual_format, moments.pop(name, None))
            for name, layer in old.items()
        }
        report.layers = {name: LayerReport.of(dense[name], layer) for name, layer in new.items()}
        target = replace_modules(target, {id(old[name]): layer for name, layer in new.items()})
        report.parameters_after = count_parameters(target)
        result = target if inplace else copied(target)
        result.factorize_report = report  # type: ignore[assignment]  # a plain attribute, not a submodule
    warn_if_little(report)
    return result


@typed
def merge(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Undo `factorize`: replace factorized layers by dense ones with the same weights, and pack attention again.

    Raises:
        UserError: FSDP2 holds the model in pieces, or accelerate keeps its values elsewhere.
    """
    check_supported(model, TO_MERGE)
    model = model if inplace else copied(model)
    dense = {id(layer): layer.to_dense() for layer in factorized_layers(model).values()}
    model = pack(replace_modules(model, dense))
    for part in model.modules():  # a wrapper passes on the attributes of the module in it
        vars(part).pop("factorize_report", None)
    return model


def _check_finite(layers: Mapping[str, nn.Module]) -> None:
    weights = {name: layer.get_parameter("weight").detach() for name, layer in layers.items()}
    nonfinite = find_nonfinite({name: weight for name, weight in weights.items() if not weight.is_meta})
    if nonfinite is not None:
        raise UserError(f"layer {nonfinite}: the matrix has NaN or Inf, and no singular terms")
