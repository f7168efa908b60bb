"""What a factorization covers of a model, by parameters, and what a forward pass costs."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from sharding.factorization.choose import Choice
from sharding.factorization.obstacles import rank_of
from sharding.factorization.report import LayerReport, Report
from sharding.factorization.terms import GROWS, UNGIVEN, UNUSED, Cost
from sharding.layers import FactorizedLayer, num_blocks

ASKED = "left whole as asked"


class CoverageWarning(UserWarning):
    """Little or nothing of a model was sharded, for reasons that the caller did not give."""


def describe(name: str, dense: nn.Module, factorized: FactorizedLayer, positions: Mapping[str, int]) -> LayerReport:
    """Report on one layer."""
    cost, n = Cost.of(dense), factorized.num_terms
    use = Cost.of_use(dense, positions.get(name, 0) if positions else 1)
    return LayerReport(
        type(dense).__name__,
        rank_of(dense),
        n,
        (cost.whole, n * cost.term),
        (use.whole, n * use.term),
        _kept_energy(dense, factorized),
    )


def uncovered(model: nn.Module, replaced: Mapping[str, nn.Module], whole: Mapping[str, str]) -> dict[str, int]:
    """Count the parameters that are in no replaced weight, by kind, shared ones once."""
    seen = {id(layer.weight) for layer in replaced.values()}
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        for kind, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                told = whole[name] if name in whole else f"{_type(module)}.{kind}"
                counts[told] = counts.get(told, 0) + _size(parameter)
    return counts


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, shared ones counted once."""
    return sum(_size(parameter) for parameter in model.parameters())


@torch.no_grad()
def count_positions(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Sequence[Any]) -> dict[str, int]:
    """Return at how many positions a forward pass applies each layer: tokens, pixels, samples, summed over calls."""
    counts = dict.fromkeys(layers, 0)

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(layer, _ConvTransposeNd):  # applied where its inputs are
            counts[name] += args[0].numel() // layer.in_channels
        else:
            counts[name] += output.numel() // _outputs(layer)

    handles = [layer.register_forward_hook(partial(note, name)) for name, layer in layers.items()]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()(*inputs)
    finally:
        for module, training in modes.items():
            module.training = training
        for handle in handles:
            handle.remove()
    return counts


def warn_if_little(report: Report, stacklevel: int) -> None:
    """Warn where nothing, or less than half of what the caller did not want whole, is sharded.

    Args:
        report: of what was done.
        stacklevel: of the caller to blame.
    """
    covered = sum(layer.parameters[0] for layer in report.layers.values())
    wanted = (ASKED, GROWS, UNGIVEN, UNUSED)
    open_to_it = report.parameters_before - sum(
        size for kind, size in report.uncovered.items() if kind.startswith(wanted)
    )
    if covered and 2 * covered >= open_to_it:
        return
    kinds = sorted(report.uncovered, key=lambda kind: -report.uncovered[kind])[:4]
    listed = ", ".join(f"{kind} {report.share(kind):.1%}" for kind in kinds)
    told = f"only {report.coverage:.1%} of the parameters are" if covered else "nothing is"
    warnings.warn(f"{told} factorized; what stays whole: {listed}", CoverageWarning, stacklevel + 1)


def reasons(choice: Choice, terms: Mapping[str, int | str]) -> dict[str, str]:
    """Return why each layer that stays whole does."""
    asked = {name: f"{ASKED} ({pattern})" for name, pattern in choice.asked.items()}
    return asked | choice.cannot | {name: reason for name, reason in terms.items() if isinstance(reason, str)}


def _kept_energy(dense: nn.Module, factorized: FactorizedLayer) -> float:
    """Σλ² of the terms over ‖W‖²: a term's λ is ‖u'‖‖v'‖, in each block."""
    if factorized.u.is_meta:
        return nan
    weight, blocks = dense.weight, num_blocks(dense)
    assert isinstance(weight, Tensor)
    u, v = (part.detach().double().unflatten(0, (blocks, -1)) for part in (factorized.u, factorized.v))
    total = float(torch.linalg.vector_norm(_at_least_single(weight.detach()))) ** 2
    return float((u.square().sum(dim=1) * v.square().sum(dim=1)).sum()) / total if total else 1.0


def _at_least_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor


def _outputs(layer: nn.Module) -> int:
    """The length of what a layer makes at one position."""
    for name in ("out_features", "nf", "out_channels", "embedding_dim"):
        if isinstance(length := getattr(layer, name, None), int):
            return length
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _type(module: nn.Module) -> str:
    return type(module).__name__


def _size(parameter: Tensor) -> int:
    return 0 if isinstance(parameter, nn.UninitializedParameter) else parameter.numel()
