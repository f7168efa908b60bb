"""Report the share of a model's parameters that is factorized."""

import warnings
from collections.abc import Mapping
from math import nan

import torch
from torch import Tensor, nn

from sharding.factorization.choose import ENDS, Choice, Pattern
from sharding.factorization.obstacles import rank_of
from sharding.factorization.report import LayerReport, Report
from sharding.factorization.terms import GROWS, UNGIVEN, Cost
from sharding.layers import FactorizedLayer, num_blocks

ASKED = ("skip: ", "default skip: ")


class CoverageWarning(UserWarning):
    """Little or nothing of a model was sharded, although the caller did not ask for that."""


def describe(dense: nn.Module, factorized: FactorizedLayer) -> LayerReport:
    """Report on one layer."""
    cost, n = Cost.of(dense), factorized.num_terms
    return LayerReport(
        type(dense).__name__,
        rank_of(dense),
        n,
        (cost.whole, n * cost.term),
        _kept_energy(dense, factorized),
    )


def uncovered(model: nn.Module, replaced: Mapping[str, nn.Module], whole: Mapping[str, str]) -> dict[str, int]:
    """Count the parameters outside the replaced weights, by kind; shared ones count once."""
    seen = {id(layer.weight) for layer in replaced.values()}
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        for kind, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                reason = whole[name] if name in whole else f"{_type(module)}.{kind}"
                counts[reason] = counts.get(reason, 0) + _size(parameter)
    return counts


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, shared ones counted once."""
    return sum(_size(parameter) for parameter in model.parameters())


def warn_if_little(report: Report, stacklevel: int) -> None:
    """Warn if nothing is sharded, or less than half of what the caller did not skip.

    Args:
        report: of `factorize`.
        stacklevel: of the caller that the warning names.
    """
    covered = sum(layer.parameters[0] for layer in report.layers.values())
    wanted = (*ASKED, GROWS, UNGIVEN)
    open_to_it = report.parameters_before - sum(
        size for kind, size in report.uncovered.items() if kind.startswith(wanted)
    )
    if covered and 2 * covered >= open_to_it:
        return
    kinds = sorted(report.uncovered, key=lambda kind: -report.uncovered[kind])[:4]
    listed = ", ".join(f"{kind} {report.share(kind):.1%}" for kind in kinds)
    how_much = f"only {report.coverage:.1%} of the parameters are" if covered else "nothing is"
    warnings.warn(f"{how_much} factorized; what stays dense: {listed}", CoverageWarning, stacklevel + 1)


def reasons(choice: Choice, terms: Mapping[str, int | str], skip: tuple[Pattern, ...]) -> dict[str, str]:
    """Return why each dense layer stays dense."""
    prefix = ASKED[skip == ENDS]
    asked = {name: f"{prefix}{pattern}{' layer' if pattern in ENDS else ''}" for name, pattern in choice.asked.items()}
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


def _type(module: nn.Module) -> str:
    return type(module).__name__


def _size(parameter: Tensor) -> int:
    return 0 if isinstance(parameter, nn.UninitializedParameter) else parameter.numel()
