"""Which layers of a model are sharded: those that can be, but for what the caller or the model leaves whole.

This is the one place that decides. The planner asks it of the server's model, `factorize` of anybody's.
"""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from sharding.errors import UserError
from sharding.layers import dense_types, factorized_type

ENDS = ("first", "last")  # stand for the first and the last affine layer, or for those that the model itself names


def rank_of(layer: nn.Module) -> int:
    """Return N = min(out, in) of an affine layer, a convolution being seen as (out, in·kh·kw)."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return min(weight.shape[0], weight[0].numel()) if weight.numel() else 0


def shardable_layers(model: nn.Module, skip: str | Iterable[str] = ENDS) -> dict[str, nn.Module]:
    """Return the affine layers to shard, by name, in order of registration.

    A layer of rank 1 is a single term: there is nothing to choose, and it stays whole.

    Args:
        model: any module.
        skip: layers to leave whole. Each entry is a full name, the name of an enclosing module, a dotted suffix
            (``"attn.query"``), a shell pattern (``"blocks.*.mlp.*"``), or ``"first"`` / ``"last"``. What is given
            replaces the default, which leaves the first and the last affine layer whole. A model may name its ends
            itself, as an attribute: with ``ends = ("tokens", "fc")`` the first is the module ``tokens`` (an embedding,
            say, which is never sharded), the last is ``fc``.

    Raises:
        UserError: a pattern matches nothing, or a layer is of a kind that cannot be factorized. All such problems are
            told at once, each with its layer's name.
    """
    affine: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, dense_types())
    }
    skipped = _skipped(model, list(affine), skip)
    layers = {name: module for name, module in affine.items() if name not in skipped}
    problems = [f"{name}: {reason}" for name, reason in _obstacles(model, layers)]
    if problems:
        raise UserError(f"cannot factorize {'; '.join(problems)}. Leave whole what cannot be sharded with skip=[…]")
    return {name: layer for name, layer in layers.items() if rank_of(layer) > 1}


def as_patterns(skip: str | Iterable[str]) -> tuple[str, ...]:
    """Return what a caller gave as `skip`, one pattern or several, as a tuple."""
    return (skip,) if isinstance(skip, str) else tuple(skip)


def _skipped(model: nn.Module, affine: list[str], skip: str | Iterable[str]) -> set[str]:
    """Return the names of the affine layers that some pattern of `skip` matches."""
    skipped: set[str] = set()
    for pattern in as_patterns(skip):
        if pattern in ENDS:
            skipped.update(_end(model, affine, ENDS.index(pattern)))
            continue
        matched = {name for name in affine if _matches(pattern, name)}
        if not matched and not any(_matches(pattern, name) for name, _ in model.named_modules()):
            near = get_close_matches(pattern, affine, n=3, cutoff=0.0)
            raise UserError(f"skip pattern {pattern!r} matches no layer; the nearest names are {', '.join(near)}")
        skipped |= matched
    return skipped


def _end(model: nn.Module, affine: list[str], which: int) -> list[str]:
    """Return the affine layers at the first (0) or the last (1) end of a model."""
    named = getattr(model, "ends", None)
    if named is None:
        return affine[:1] if which == 0 else affine[-1:]
    end = named[which]
    if end not in dict(model.named_modules()):
        raise UserError(f"{type(model).__name__}.ends names {end!r}, which is no module of the model")
    return [name for name in affine if name == end or name.startswith(f"{end}.")]


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
        elif factorized_type(layer) is None:
            yield (
                name,
                f"{type(layer).__name__} is a subclass whose own behavior a factorized layer would lose",
            )
