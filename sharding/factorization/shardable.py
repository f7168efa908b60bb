"""Which layers of a model are sharded: every affine layer that the caller or the model does not keep dense.

Only this module decides. The planner asks it for the server's model, `factorize` for any model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from torch import nn

from sharding.errors import UserError, join_first
from sharding.factorization.support import LAYERS, TO_LIST, Candidate, ModelContext, check_supported, find_sentence
from sharding.layers import FactorizedLayer, is_affine, is_on_demand
from sharding.modules.wrappers import get_submodule, named_modules, unwrap
from sharding.validation import typed

Pattern = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Patterns = Pattern | Iterable[Pattern]
ENDS = ("first", "last")  # the first and the last affine layer, or those that the model names
PACKED = "nn.MultiheadAttention packs its projections in one bare weight; call sharding.unpack_attention first"


@dataclass(frozen=True)
class SortedLayers:
    """Which layers are sharded, and why the others are not.

    Attributes:
        shardable: layers that can be sharded, by name, in order of registration.
        skipped: layers that the caller or the model keeps dense, with the pattern that matched.
        unsupported: layers that cannot be sharded, with the reason; layers of one kind share one reason.
    """

    shardable: dict[str, nn.Module]
    skipped: dict[str, str]
    unsupported: dict[str, str]


def sort_layers(model: nn.Module, skip: Patterns = ENDS, also: Patterns = ()) -> SortedLayers:
    """Decide which layers are sharded; see `shardable_layers` for the arguments."""
    modules = dict(named_modules(model))
    context = ModelContext(model)
    demanded = matching(model, [name for name, module in modules.items() if is_on_demand(module)], also, "also")
    candidates = {
        name: module
        for name, module in modules.items()
        if is_affine(module) or name in demanded or isinstance(module, FactorizedLayer)
    }
    skipped = _match_skip(model, [name for name in candidates if not context.is_adapter(name)], demanded, skip)
    attentions = {name: module for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)}
    skipped |= _match_skip(model, list(attentions), set(attentions), skip)
    candidates |= attentions
    reasons = {
        name: find_sentence(LAYERS, Candidate(name, module, context))
        for name, module in candidates.items()
        if name not in skipped
    }
    shardable = {name: candidates[name] for name, reason in reasons.items() if reason is None}
    return SortedLayers(shardable, skipped, {name: reason for name, reason in reasons.items() if reason is not None})


@typed
def shardable_layers(model: nn.Module, skip: Patterns = ENDS, also: Patterns = ()) -> dict[str, nn.Module]:
    """Return the affine layers to shard, by name, in order of registration.

    Layers that cannot be sharded stay dense. So does a layer of rank 1, which has a single term.

    Args:
        model: any module.
        skip: layers to keep dense, by default the first and the last affine layer. An entry can be

            - the name of a layer or of an enclosing module, the end of such a name (``"attn.query"``) if no module has
              exactly this name, or a shell pattern (``"blocks.*.mlp"``); a module with several names matches by any;
            - the class of a layer or of an enclosing module;
            - a function of (name, layer);
            - ``"first"`` or ``"last"``. If the model begins with an embedding, the embedding is the first layer, and no
              affine layer is skipped as first. A model can name its own ends in an attribute,
              ``ends = ("tokens", "fc")``; an end can be a tuple of names, for several heads. If the model has a module
              called ``first`` or ``last``, the word means this module.
        also: layers to shard that stay dense by default, as embeddings do; patterns as for `skip`.

    Raises:
        UserError: a pattern matches nothing, the model is scripted, or it has an `nn.MultiheadAttention` that has yet
            to be unpacked.
    """
    check_supported(model, TO_LIST)
    layers = sort_layers(model, skip, also)
    if packed := packed_attention(model, skip):
        names = join_first([name or "the model itself" for name in packed])
        raise UserError(f"cannot factorize {names}: {PACKED}, or keep it dense with skip=[…]")
    return layers.shardable


def packed_attention(model: nn.Module, skip: Patterns) -> list[str]:
    """Return the names of the attentions that can be unpacked and that `skip` does not match."""
    context = ModelContext(model)
    names = [
        name
        for name, module in named_modules(model)
        if isinstance(module, nn.MultiheadAttention) and context.reason_against_unpacking(name) is None
    ]
    patterns = [pattern for pattern in as_patterns(skip) if not _is_end(pattern, model)]
    known = aliases(model)
    skipped = {name for pattern in patterns for name in names if matches(model, pattern, known[name])}
    return [name for name in names if name not in skipped]


def as_patterns(skip: Patterns) -> tuple[Pattern, ...]:
    """Return one or several patterns as a tuple; raise a UserError if something is not a pattern."""
    given: Any = skip
    single = isinstance(given, str | type) or callable(given) or not isinstance(given, Iterable)
    patterns: tuple[Any, ...] = (given,) if single else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str) and not callable(pattern):
            raise UserError(f"{pattern!r} is not a pattern; pass names, shell patterns, classes or functions")
    return patterns


def matching(model: nn.Module, names: Iterable[str], patterns: Patterns, what: str) -> set[str]:
    """Return the names that some pattern matches; `what` is the argument that gave the patterns.

    Raise a UserError if a class or name matches no module, or a name none with parameters.
    """
    names, known, matched = list(names), aliases(model), set()
    # The model itself, whose name is empty, is a layer only where nothing is inside it.
    modules = {name: get_submodule(model, name) for name in known if name or len(known) == 1}
    layers = [known[name] for name, module in modules.items() if next(module.parameters(), None) is not None]
    for pattern in as_patterns(patterns):
        names_matched = {name for name in names if matches(model, pattern, known[name])}
        others = layers if isinstance(pattern, str) else known.values() if isinstance(pattern, type) else None
        if not names_matched and others is not None and not any(matches(model, pattern, each) for each in others):
            near = get_close_matches(str(pattern), names or list(known), n=3, cutoff=0.0)
            raise UserError(f"{what} pattern {pattern!r} matches no layer; the nearest names are {', '.join(near)}")
        matched |= names_matched
    return matched


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of every module, by its first name; a module that is registered twice has two."""
    names: dict[int, list[str]] = {}
    for name, module in named_modules(model, remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return {each[0]: each for each in names.values()}


def matches(model: nn.Module, pattern: Pattern, names: Iterable[str]) -> bool:
    """Whether a pattern matches a module with these names, or a module around it."""
    return any(_matches(model, pattern, name) for name in names)


def _matches(model: nn.Module, pattern: Pattern, name: str) -> bool:
    parts = name.split(".")
    around = [".".join(parts[: end + 1]) for end in range(len(parts))]
    if isinstance(pattern, type):
        return any(isinstance(get_submodule(model, outer), pattern) for outer in around)
    if not isinstance(pattern, str):
        return bool(pattern(name, get_submodule(model, name)))
    if _has_module(model, pattern):  # only this one, not every name with this end
        return pattern in around
    return any(outer.endswith(f".{pattern}") or fnmatchcase(outer, pattern) for outer in around)


def _has_module(model: nn.Module, name: str) -> bool:
    try:
        get_submodule(model, name)
    except AttributeError:
        return False
    return True


def _match_skip(model: nn.Module, affine: list[str], unranked: set[str], skip: Patterns) -> dict[str, str]:
    """Return the layers to keep dense, with the pattern that matched; unranked layers are neither first nor last."""
    labels: dict[str, str] = {}
    for pattern in as_patterns(skip):
        if _is_end(pattern, model):
            ordinary = [name for name in affine if name not in unranked]
            matched = set(_end_layers(model, ordinary, ENDS.index(pattern)))
        else:
            matched = matching(model, affine, pattern, "skip")
        label = pattern if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))
        labels = dict.fromkeys((name for name in affine if name in matched), label) | labels
    return labels


def _is_end(pattern: Pattern, model: nn.Module) -> TypeGuard[str]:
    return isinstance(pattern, str) and pattern in ENDS and not _has_module(model, pattern)


def _end_layers(model: nn.Module, affine: list[str], end: int) -> list[str]:
    """Return the affine layers at the first (0) or the last (1) end of a model."""
    named = getattr(unwrap(model), "ends", None)
    try:
        ends = (named[end],) if isinstance(named[end], str) else tuple(named[end])  # type: ignore[index]
    except (TypeError, KeyError, IndexError):  # no attribute, or one of the same name that means something else
        return affine[-1:] if end == 1 else [] if _begins_with_embedding(model) else affine[:1]
    for name in ends if affine else ():
        if not _has_module(model, name):
            raise UserError(f"{type(model).__name__}.ends names {name!r}, which is not a module of the model")
    known = aliases(model)
    return [name for name in affine if any(matches(model, each, known[name]) for each in ends)]


def _begins_with_embedding(model: nn.Module) -> bool:
    kinds = (is_on_demand(part) for part in model.modules() if is_affine(part) or is_on_demand(part))
    return next(kinds, False)
