"""Replace the packed projections of attention by separate layers, so that each can be sharded, and back."""

from collections.abc import Iterable

from torch import nn

from sharding.factorization.shardable import packed_attention
from sharding.factorization.support import TO_REPLACE, check_supported
from sharding.layers import UnpackedAttention
from sharding.modules.copies import copied, replace_modules
from sharding.modules.wrappers import get_submodule
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
    """Undo unpacking, in place."""
    packed: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, UnpackedAttention):
            packed[id(module)] = module.to_packed()
        elif isinstance(module, nn.TransformerEncoder) and NESTED_TENSOR in vars(module):
            vars(module)["use_nested_tensor"] = vars(module).pop(NESTED_TENSOR)
    return replace_modules(model, packed)
