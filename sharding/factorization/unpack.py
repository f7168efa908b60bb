"""Replace fused and packed projections by separate layers, so that each can be sharded, and back."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from sharding.errors import UserError
from sharding.factorization.shardable import Pattern, matching, packed_attention
from sharding.factorization.support import TO_REPLACE, ModelContext, check_supported
from sharding.layers import SplitLinear, UnpackedAttention
from sharding.modules.copies import copied, replace_modules
from sharding.modules.wrappers import get_submodule, named_modules
from sharding.validation import typed

NESTED_TENSOR = "use_nested_tensor_when_packed"  # the encoder's own flag, which `pack` restores


@typed
def unpack_attention(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Replace every `nn.MultiheadAttention` by one whose projections are layers, so that they can be sharded.

    `factorize` calls this function. Call it yourself on a server's model before you pass the model to `ShardPlanner`.
    Attention with add_bias_kv or add_zero_attn is not replaced, nor are subclasses.
    """
    check_supported(model, TO_REPLACE)
    model = model if inplace else copied(model)
    return unpack(model, packed_attention(model, ()))


@typed
def split_layers(model: nn.Module, parts: Mapping[Pattern, int | Sequence[int]], inplace: bool = False) -> nn.Module:
    """Replace fused linear layers by ones whose parts are layers; `merge` fuses them again.

    Args:
        model: any module; it is not changed unless `inplace`.
        parts: the number of equal parts of the outputs, or their sizes, by pattern: ``{"attn.qkv": 3}``.
        inplace: change `model` itself instead of a copy.

    Raises:
        UserError: a pattern matches nothing, the outputs of a layer cannot be split like this, or its weight is tied.
    """
    check_supported(model, TO_REPLACE)
    model = model if inplace else copied(model)
    split, context = dict[str, SplitLinear](), ModelContext(model)
    for pattern, sizes in parts.items():
        linear = [
            name
            for name, module in named_modules(model)
            if not (module._modules or isinstance(get_submodule(model, name.rpartition(".parts.")[0]), SplitLinear))
        ]
        if not (names := sorted(matching(model, linear, pattern, "split_layers"))):
            raise UserError(f"split_layers pattern {pattern!r} matches no layer that has not been split")
        for name in names:
            layer = get_submodule(model, name)
            if others := context.tied_names(name, layer, "weight"):
                raise UserError(f"{name} cannot be split: its weight is tied to {', '.join(others)}")
            split[name] = SplitLinear(layer, sizes)
    return replace_modules(model, {id(get_submodule(model, name)): layer for name, layer in split.items()})


def unpack(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Unpack the attentions of these names, in place."""
    packed = {name: get_submodule(model, name) for name in names}
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(part in packed.values() for part in encoder.modules()):
            vars(encoder)[NESTED_TENSOR] = encoder.use_nested_tensor
            vars(encoder)["use_nested_tensor"] = False  # on that path it reads the packed weights
    unpacked: dict[int, nn.Module] = {}
    for attention in packed.values():
        assert isinstance(attention, nn.MultiheadAttention)
        unpacked[id(attention)] = UnpackedAttention(attention)
    return replace_modules(model, unpacked)


def pack(model: nn.Module) -> nn.Module:
    """Undo unpacking and splitting, in place."""
    fused: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, UnpackedAttention):
            fused[id(module)] = module.to_packed()
        elif isinstance(module, SplitLinear):
            fused[id(module)] = module.to_fused()
        elif isinstance(module, nn.TransformerEncoder) and NESTED_TENSOR in vars(module):
            vars(module)["use_nested_tensor"] = vars(module).pop(NESTED_TENSOR)
    return replace_modules(model, fused)
