"""The report of `factorize`: what was replaced, what stays dense and why, and a warning if that is almost all."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Self

import torch
from torch import Tensor, nn

from sharding.factorization.shardable import ENDS, Pattern, SortedLayers
from sharding.factorization.terms import GROWS, UNGIVEN, Cost
from sharding.layers import FactorizedLayer
from sharding.layers.base import dense_weight
from sharding.layers.decomposition import form_of
from sharding.modules.wrappers import named_modules

SKIPPED = ("skip: ", "default skip: ")
FROZEN = "frozen: "


class CoverageWarning(UserWarning):
    """Little or nothing of a model was sharded, although the caller did not ask for that."""


@dataclass(frozen=True)
class LayerReport:
    """One factorized layer.

    Attributes:
        kind: the dense layer's class.
        rank: N, of one group in a grouped convolution.
        num_terms: n.
        parameters: the number of parameters of the weight, (before, after).
        energy: Σλ² of the kept terms over ‖W‖²; NaN on the meta device.
        residual_bytes: the bytes of the frozen residual, 0 without one.
    """

    kind: str
    rank: int
    num_terms: int
    parameters: tuple[int, int]
    energy: float
    residual_bytes: int = 0

    @classmethod
    def of(cls, dense: nn.Module, factorized: FactorizedLayer) -> Self:
        """Report on a layer and its replacement."""
        cost, n = Cost.of(dense), factorized.num_terms
        sizes = (cost.dense, n * cost.term)
        frozen = 0 if factorized.residual is None else factorized.residual.nbytes
        return cls(type(dense).__name__, form_of(dense).rank, n, sizes, _kept_energy(dense, factorized), frozen)


@dataclass
class FactorizationReport:
    """What `factorize` did.

    Attributes:
        layers: the replaced layers, by name.
        unfactorized: the reason for each layer that stays dense, by name.
        uncovered: numbers of parameters outside the replaced weights, by kind: the reason for a layer that stays dense,
            else module and parameter, and whether it is frozen.
        parameters_before: the number of parameters of the whole model; shared ones count once.
        parameters_after: the same, afterwards.
    """

    layers: dict[str, LayerReport] = field(default_factory=dict)
    unfactorized: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, int] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0

    @property
    def coverage(self) -> float:
        """The share of the model's parameters in the replaced weights."""
        return sum(layer.parameters[0] for layer in self.layers.values()) / max(self.parameters_before, 1)

    def __str__(self) -> str:
        before, after = self.parameters_before, self.parameters_after
        lines = [
            f"factorized {len(self.layers)} layers, kept {len(self.unfactorized)} dense: {before:,} -> {after:,} "
            f"parameters ({after / max(before, 1):.1%}), coverage {self.coverage:.1%}"
        ]
        if self.layers:
            rows = [_row(pattern, [self.layers[name] for name in names]) for pattern, names in _by_pattern(self.layers)]
            lines += _table([("layers", "", "N", "n", "parameters", "energy"), *rows])
            lines.append("  N: singular terms, n: terms kept, energy: the share of ‖W‖² that these hold")
        if frozen := sum(layer.residual_bytes for layer in self.layers.values()):
            lines.append(f"  on top of a frozen residual of {frozen / 1e6:,.1f} MB")
        lines += [f"kept dense: {self.share(kind):6.1%}  {kind}" for kind in self._largest()]
        return "\n".join(lines)

    def share(self, kind: str) -> float:
        """Return the share of all parameters that are of an uncovered kind."""
        return self.uncovered[kind] / max(self.parameters_before, 1)

    def _largest(self) -> list[str]:
        """The uncovered kinds, largest first, without those that hold almost nothing."""
        kinds = sorted(self.uncovered, key=lambda kind: -self.uncovered[kind])
        return [kind for kind in kinds if self.share(kind) >= 0.001 or kind in self.unfactorized.values()][:10]


def uncovered(model: nn.Module, replaced: Mapping[str, nn.Module], unfactorized: Mapping[str, str]) -> dict[str, int]:
    """Count the parameters outside the replaced weights, by kind; shared ones count once."""
    seen = {id(layer.weight) for layer in replaced.values()}
    counts: dict[str, int] = {}
    for name, module in named_modules(model):
        for kind, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                frozen = "" if parameter.requires_grad else FROZEN
                reason = unfactorized[name] if name in unfactorized else f"{frozen}{_class_name(module)}.{kind}"
                counts[reason] = counts.get(reason, 0) + _size(parameter)
    return counts


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class, with its package where torch has a class of the same name."""
    kind = type(module)
    known = getattr(nn, kind.__name__, kind)
    return kind.__name__ if known is kind else f"{kind.__module__}.{kind.__qualname__}"


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, shared ones counted once."""
    return sum(_size(parameter) for parameter in model.parameters())


def warn_if_little(report: FactorizationReport) -> None:
    """Warn the caller of `factorize` if nothing is sharded, or less than half of what was not skipped."""
    covered = sum(layer.parameters[0] for layer in report.layers.values())
    chosen = (*SKIPPED, FROZEN, GROWS, UNGIVEN)
    open_to_sharding = report.parameters_before - sum(
        size for kind, size in report.uncovered.items() if kind.startswith(chosen)
    )
    if covered and 2 * covered >= open_to_sharding:
        return
    kinds = sorted(report.uncovered, key=lambda kind: -report.uncovered[kind])[:4]
    listed = ", ".join(f"{kind} {report.share(kind):.1%}" for kind in kinds) or "a model without parameters"
    how_much = f"only {report.coverage:.1%} of the parameters are" if covered else "nothing is"
    is_foreign = any(" " not in kind and kind.count(".") > 1 for kind in kinds[:1])
    hint = "; sharding.register_layer adds a class of layers" if is_foreign else ""
    warnings.warn(f"{how_much} factorized; what stays dense: {listed}{hint}", CoverageWarning, stacklevel=4)


def reasons(layers: SortedLayers, terms: Mapping[str, int | str], skip: tuple[Pattern, ...]) -> dict[str, str]:
    """Return why each dense layer stays dense."""
    prefix = SKIPPED[skip == ENDS]
    skipped = {
        name: f"{prefix}{pattern}{' layer' if pattern in ENDS else ''}" for name, pattern in layers.skipped.items()
    }
    return skipped | layers.unsupported | {name: reason for name, reason in terms.items() if isinstance(reason, str)}


def _kept_energy(dense: nn.Module, factorized: FactorizedLayer) -> float:
    """Σλ² of the terms over ‖W‖²: a term's λ is ‖u'‖‖v'‖, in each block."""
    if factorized.u.is_meta:
        return nan
    weight, blocks = dense_weight(dense).detach(), factorized.num_blocks
    u, v = (part.detach().double().unflatten(0, (blocks, -1)) for part in (factorized.u, factorized.v))
    weight = weight.float() if weight.element_size() < 4 else weight  # at least single precision
    total = float(torch.linalg.vector_norm(weight)) ** 2
    return float((u.square().sum(dim=1) * v.square().sum(dim=1)).sum()) / total if total else 1.0


def _size(parameter: Tensor) -> int:
    return 0 if isinstance(parameter, nn.UninitializedParameter) else parameter.numel()


def _by_pattern(layers: dict[str, LayerReport]) -> list[tuple[str, list[str]]]:
    """Group layers of one kind whose names differ only in numbers; return each group's pattern and names."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", name), layer.kind), []).append(name)
    return [(names[0] if len(names) == 1 else pattern, names) for (pattern, _), names in groups.items()]


def _row(pattern: str, group: list[LayerReport]) -> tuple[str, ...]:
    return (
        pattern or "(the model)",
        f"{len(group)} {group[0].kind}",
        _range([layer.rank for layer in group], "d"),
        _range([layer.num_terms for layer in group], "d"),
        " -> ".join(_with_unit(sum(layer.parameters[side] for layer in group)) for side in (0, 1)),
        _range([layer.energy for layer in group], ".0%"),
    )


def _range(numbers: Sequence[float], form: str) -> str:
    return "–".join(dict.fromkeys(f"{number:{form}}" for number in (min(numbers), max(numbers))))


def _with_unit(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [f"{{:{'<' if column < 2 else '>'}{width}}}" for column, width in enumerate(widths)]
    return [f"  {'  '.join(aligned).format(*row)}".rstrip() for row in rows]
