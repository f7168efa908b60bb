"""The report of `factorize`, for people."""

import re
from dataclasses import dataclass, field

LINES = 24  # a table of so many fits a screen


@dataclass(frozen=True)
class LayerReport:
    """One factorized layer.

    Attributes:
        kind: the dense layer's class.
        rank: N, of one group in a grouped convolution.
        num_terms: n.
        parameters: of the weight, (before, after).
        energy: Σλ² of the kept terms over ‖W‖²; NaN on the meta device.
    """

    kind: str
    rank: int
    num_terms: int
    parameters: tuple[int, int]
    energy: float


@dataclass
class Report:
    """What `factorize` did.

    Attributes:
        layers: the replaced layers, by name.
        whole: the reason for each layer that stays dense, by name.
        uncovered: numbers of parameters outside the replaced weights, by kind: the reason for a layer that stays dense,
            else module and parameter.
        parameters_before: of the whole model; shared ones count once.
        parameters_after: the same, afterwards.
    """

    layers: dict[str, LayerReport] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, int] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0

    @property
    def replaced(self) -> dict[str, tuple[int, int]]:
        """(N, n) of the layers replaced, by name."""
        return {name: (layer.rank, layer.num_terms) for name, layer in self.layers.items()}

    @property
    def coverage(self) -> float:
        """The share of the model's parameters in the replaced weights."""
        return sum(layer.parameters[0] for layer in self.layers.values()) / max(self.parameters_before, 1)

    def __str__(self) -> str:
        before, after = self.parameters_before, self.parameters_after
        lines = [
            f"factorized {len(self.layers)} layers, kept {len(self.whole)} dense: {before:,} -> {after:,} parameters "
            f"({after / max(before, 1):.1%}), coverage {self.coverage:.1%}"
        ]
        rows = [_row(pattern, names, self.layers) for pattern, names in _alike(self.layers).items()]
        if rows:
            header = ("layers", "", "N", "n", "parameters", "energy")
            lines += _table([header, *_shortened(rows)])
            lines.append("  N: singular terms, n: terms kept, energy: the share of ‖W‖² that these hold")
        lines += [f"kept dense: {self.share(kind):6.1%}  {kind}" for kind in self._largest()]
        return "\n".join(lines)

    def share(self, kind: str) -> float:
        """Return the share of all parameters that are of an uncovered kind."""
        return self.uncovered[kind] / max(self.parameters_before, 1)

    def _largest(self) -> list[str]:
        """The uncovered kinds, largest first, without those that hold almost nothing."""
        kinds = sorted(self.uncovered, key=lambda kind: -self.uncovered[kind])
        return [kind for kind in kinds if self.share(kind) >= 0.001 or kind in self.whole.values()][:10]


def _alike(layers: dict[str, LayerReport]) -> dict[str, list[str]]:
    """Group layers whose names differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for name in layers:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return {names[0] if len(names) == 1 else pattern: names for pattern, names in groups.items()}


def _row(pattern: str, names: list[str], layers: dict[str, LayerReport]) -> tuple[str, ...]:
    group = [layers[name] for name in names]
    energies = [layer.energy for layer in group]
    return (
        pattern or "(the model)",
        f"{len(group)} {group[0].kind}",
        _range([layer.rank for layer in group]),
        _range([layer.num_terms for layer in group]),
        _change([layer.parameters for layer in group]),
        "–".join(dict.fromkeys(f"{energy:.0%}" for energy in (min(energies), max(energies)))),
    )


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _change(pairs: list[tuple[int, int]]) -> str:
    return " -> ".join(_short(sum(pair[side] for pair in pairs)) for side in (0, 1))


def _short(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def _shortened(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(rows) <= LINES:
        return rows
    left_out = ("…", f"{len(rows) - LINES + 1} more rows", "", "", "", "")
    return [*rows[: LINES - 1], left_out]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column < 2 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
