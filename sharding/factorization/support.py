"""Find out why a layer cannot be factorized."""

import torch
from torch import nn

from sharding.layers import FactorizedLayer, factorized_type, num_blocks, padding_row
from sharding.layers.attention import reason_against_unpacking
from sharding.layers.decomposition import form_of
from sharding.modules.wrappers import has_own_forward, is_distributed, is_ordinary, key, named_modules

STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class ModelContext:
    """What `reason_unsupported` needs to know about the model around a layer."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, list[str]] = {}
        self._modules: dict[str, nn.Module] = {}
        for name, module in named_modules(model):
            self._modules[name] = module
            for kind, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(f"{name}.{kind}".lstrip("."))

    def is_adapter(self, name: str) -> bool:
        """Whether PEFT put this layer beside a `base_layer`; such a layer is already small."""
        parts = name.split(".")
        for end in range(len(parts)):
            base = self._modules[".".join(parts[:end])]._modules.get("base_layer")
            # A module of this name can be anything; PEFT wraps layers, which have a weight.
            if base is not None and "weight" in base._parameters and parts[end] != "base_layer":
                return True
        return False

    def attention_around(self, name: str) -> str | None:
        """Return the name of the packed attention that a module is, or is the output projection of."""
        enclosing = (name, name.rpartition(".")[0])
        return next((each for each in enclosing if isinstance(self._modules[each], nn.MultiheadAttention)), None)

    def reason_against_unpacking(self, name: str) -> str | None:
        """Return why the attention of this name cannot be unpacked, or None if it can."""
        attention = self._modules[name]
        assert isinstance(attention, nn.MultiheadAttention)
        parts = ((name, attention), (key(name, "out_proj"), attention.out_proj))
        tied = [
            other for each, part in parts for kind in part._parameters for other in self.tied_names(each, part, kind)
        ]
        return reason_against_unpacking(attention) or (f"it is tied to {', '.join(tied)}" if tied else None)

    def tied_names(self, name: str, layer: nn.Module, kind: str) -> list[str]:
        """Return the other names of the layer's parameter of that kind."""
        owners = self._owners.get(id(layer._parameters.get(kind)), [])
        return [owner for owner in owners if owner != f"{name}.{kind}".lstrip(".")]


def reason_unsupported(name: str, layer: nn.Module, context: ModelContext) -> str | None:
    """Return why a layer cannot be factorized, in the same words for all layers of a kind; None if it can."""
    if isinstance(layer, FactorizedLayer):
        return "factorized already; merge first"
    attention = context.attention_around(name)
    if attention is not None:
        reason = context.reason_against_unpacking(attention) or "its projections are one bare weight"
        return f"in a packed attention: {reason}"
    if context.is_adapter(name):
        return "an adapter beside its base layer, small already"
    return _of_weight(layer) or _of_behavior(layer) or _shared_or_extra_state(name, layer, context) or _of_rank(layer)


def _of_weight(layer: nn.Module) -> str | None:
    weight: nn.Parameter | None = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed (parametrized, normalized or pruned)"
    if isinstance(weight, nn.UninitializedParameter):
        return "not initialized yet"
    if not is_ordinary(weight):
        return f"its weight is {type(weight).__name__}"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if weight.layout != torch.strided:
        return f"its weight is {str(weight.layout).removeprefix('torch.')}"
    return None


def _of_behavior(layer: nn.Module) -> str | None:
    if hasattr(layer, "_hf_hook"):
        return "accelerate has hooked it; call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
    if factorized_type(layer) is None:
        subject = "this one" if has_own_forward(layer) else type(layer).__name__
        return f"{subject} overrides forward"
    if type(layer).get_extra_state is not nn.Module.get_extra_state:
        return f"{type(layer).__name__} has extra state"
    # FSDP2's hooks say how a state dict is put together.
    if not is_distributed(layer.weight) and any(vars(layer).get(hooks) for hooks in STATE_HOOKS):
        return "it has hooks on its state dict"
    return _of_embedding(layer) if isinstance(layer, nn.Embedding) else None


def _of_embedding(layer: nn.Embedding) -> str | None:
    if layer.sparse or layer.max_norm is not None:
        return "an embedding with sparse gradients or max_norm"
    if layer.scale_grad_by_freq:
        return "an embedding with scale_grad_by_freq"
    if layer.padding_idx is not None and padding_row(layer) is None:
        return "an embedding whose padding row is not zero"
    return None


def _shared_or_extra_state(name: str, layer: nn.Module, context: ModelContext) -> str | None:
    if set(layer._parameters) - {"weight", "bias"} or layer._buffers or layer._modules:
        return "it holds more than a weight and a bias"
    for kind in ("weight", "bias"):
        if others := context.tied_names(name, layer, kind):
            return f"its {kind} is tied to {', '.join(others)}"
    return None


def _of_rank(layer: nn.Module) -> str | None:
    if form_of(layer).rank > 1:
        return None
    return "a single term" if num_blocks(layer) == 1 else "a single term a group (depthwise convolution)"
