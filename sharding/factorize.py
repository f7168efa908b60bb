"""Turn the affine layers of any model into factorized ones, and back.

One place decides which layers are sharded; the planner asks the same place, so that what a client builds and what the
server cuts always agree.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import ceil

from torch import nn

from sharding.errors import UserError
from sharding.layers import FactorizedConv2d, FactorizedLayer, FactorizedLinear, UnpackedAttention

FACTORIZED: dict[type[nn.Module], type[FactorizedLayer]] = {
    nn.Linear: FactorizedLinear,
    nn.Conv2d: FactorizedConv2d,
}
AFFINE: tuple[type[nn.Module], ...] = tuple(FACTORIZED)
ENDS = ("first", "last")  # stand for the first and the last affine layer, in order of registration


@dataclass
class Report:
    """What `factorize` did: the layers replaced (with N, n), those left whole (with the reason), and the sizes."""

    replaced: dict[str, tuple[int, int]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0

    def __str__(self) -> str:
        lines = [
            f"factorized {len(self.replaced)} layers, left {len(self.whole)} whole: "
            f"{self.parameters_before:,} -> {self.parameters_after:,} parameters"
        ]
        lines += [f"  {name}: {n} of {rank} terms" for name, (rank, n) in self.replaced.items()]
        lines += [f"  {name}: whole ({reason})" for name, reason in self.whole.items()]
        return "\n".join(lines)


def num_terms(rank: int, keep_ratio: float) -> int:
    """Return n = ⌈N·r⌉, the singular terms that keep ratio r in (0, 1] affords of a layer of rank N.

    Raises:
        UserError: the keep ratio is outside (0, 1].
    """
    if not 0 < keep_ratio <= 1:
        raise UserError(f"keep ratio {keep_ratio} is outside (0, 1]; 0.2 keeps a fifth of each layer's singular terms")
    return ceil(rank * keep_ratio - 1e-9)  # 10·0.3 is 3.0000000000000004 in floating point


def rank_of(layer: nn.Module) -> int:
    """Return N = min(out, in) of an affine layer, a convolution being seen as (out, in·kh·kw)."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return min(weight.shape[0], weight[0].numel())


def shardable_layers(model: nn.Module, skip: str | Iterable[str] = ENDS) -> dict[str, nn.Module]:
    """Return the affine layers to shard, by name, in order of registration.

    Args:
        model: any module.
        skip: layers to leave whole. Each entry is a full name, the name of an enclosing module, a dotted suffix
            (``"attn.query"``), a shell pattern (``"blocks.*.mlp.*"``), or ``"first"`` / ``"last"``. What is given
            replaces the default, which leaves the first and the last affine layer whole.

    Raises:
        UserError: a pattern matches nothing, or a layer is of a kind that cannot be factorized. All such problems are
            told at once, each with its layer's name.
    """
    affine: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, AFFINE)
    }
    skipped = _skipped(model, list(affine), skip)
    layers = {name: module for name, module in affine.items() if name not in skipped}
    problems = [f"{name}: {reason}" for name, reason in _obstacles(model, layers)]
    if problems:
        raise UserError(f"cannot factorize {'; '.join(problems)}. Leave whole what cannot be sharded with skip=[…]")
    return layers


def as_patterns(skip: str | Iterable[str]) -> tuple[str, ...]:
    """Return what a caller gave as `skip`, one pattern or several, as a tuple."""
    return (skip,) if isinstance(skip, str) else tuple(skip)


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
            if isinstance(layer, AFFINE):
                report.whole[name] = f"skip={list(skip)}"
            return layer
        rank = rank_of(layer)
        report.replaced[name] = rank, num_terms(rank, keep_ratio)
        return FACTORIZED[_kind(layer)].from_dense(layer, num_terms(rank, keep_ratio))

    model = _replace_modules(model, replace)
    report.parameters_after = _count_parameters(model)
    model.factorize_report = report  # type: ignore[assignment]  # a plain attribute, not a submodule
    return model


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


def _skipped(model: nn.Module, affine: list[str], skip: str | Iterable[str]) -> set[str]:
    """Return the names of the affine layers that some pattern of `skip` matches."""
    skipped: set[str] = set()
    for pattern in as_patterns(skip):
        if pattern in ENDS:
            skipped.update(affine[:1] if pattern == "first" else affine[-1:])
            continue
        matched = {name for name in affine if _matches(pattern, name)}
        if not matched and not any(_matches(pattern, name) for name, _ in model.named_modules()):
            near = get_close_matches(pattern, affine, n=3, cutoff=0.0)
            raise UserError(f"skip pattern {pattern!r} matches no layer; the nearest names are {', '.join(near)}")
        skipped |= matched
    return skipped


def _matches(pattern: str, name: str) -> bool:
    return (
        name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)
    )


def _obstacles(model: nn.Module, layers: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Say of each layer that cannot be factorized why not."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    packed = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    for name, layer in layers.items():
        twins = [twin for twin in owners[id(layer.weight)] if model.get_submodule(twin.rpartition(".")[0]) is not layer]
        if getattr(layer, "groups", 1) != 1:
            yield (
                name,
                f"it is a convolution with groups={layer.groups}, and only groups=1 has singular terms to share",
            )
        elif any(name.startswith(f"{attention}.") for attention in packed):
            yield (
                name,
                "nn.MultiheadAttention packs its projections in one bare weight; call sharding.unpack_attention first",
            )
        elif twins:
            yield name, f"its weight is tied to {', '.join(twins)}"
        elif type(layer) is not _kind(layer):
            yield (
                name,
                f"{type(layer).__name__} is a subclass whose own behavior a factorized layer would lose",
            )


def _kind(layer: nn.Module) -> type[nn.Module]:
    return next(kind for kind in FACTORIZED if isinstance(layer, kind))


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
