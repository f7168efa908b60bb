"""What cannot be used: each kind of module, tensor or layer, with the sentence that a user reads about it.

A public function that is given a model checks it once, by the table of what it does with the model; what lies below
trusts it. A layer that cannot be factorized is no mistake: it stays dense, for a reason in `LAYERS`.

In a table, each sentence has a test. If the test returns something true, the sentence applies, and this is its
``{found}``. The first one counts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sharding.errors import UserError
from sharding.layers import FactorizedLayer, factorized_type, num_blocks, padding_row
from sharding.layers.attention import reason_against_unpacking
from sharding.layers.base import FACTORS
from sharding.layers.decomposition import form_of
from sharding.matrices.values import as_real
from sharding.modules.wrappers import has_own_forward, is_distributed, key, named_modules, named_state
from sharding.transport.serialize import TYPES

Table = dict[str, Callable[[Any], object]]


class Use(NamedTuple):
    """What is done with a model: the kinds of modules, and of entries of its state, that cannot be used for it."""

    modules: Table
    tensors: Table


class ModelContext:
    """What the reasons of a layer need to know about the model around it."""

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

    def reason_packed(self, name: str) -> str | None:
        """Return why the packed attention stays packed that a module is, or is the output projection of."""
        enclosing = (name, name.rpartition(".")[0])
        packed = next((each for each in enclosing if isinstance(self._modules[each], nn.MultiheadAttention)), None)
        if packed is None:
            return None
        return self.reason_against_unpacking(packed) or "its projections are one bare weight"

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


class Candidate(NamedTuple):
    """A layer that is sharded unless there is a reason against it."""

    name: str
    layer: Any
    context: ModelContext

    @property
    def weight(self) -> Any:
        """Its weight; None where that is computed."""
        return self.layer._parameters.get("weight")

    def tied(self, kind: str) -> str:
        """Return the other names of its weight or bias."""
        return ", ".join(self.context.tied_names(self.name, self.layer, kind))


def _foreign_class(entry: object) -> str | None:
    """Return the class of what is no tensor, or one whose memory does not hold its values, as a quantized weight's."""
    ordinary = isinstance(entry, Tensor) and type(entry).__torch_dispatch__ is Tensor.__torch_dispatch__
    return None if ordinary or is_distributed(entry) else type(entry).__name__


def _layout(tensor: Tensor) -> str | None:
    return None if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.")


def _shares_memory(tensor: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_offloaded(module: nn.Module) -> bool:
    parameters = module._parameters.values()
    return hasattr(module, "_hf_hook") and any(part is not None and part.is_meta for part in parameters)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _has_state_hooks(layer: nn.Module) -> bool:
    names = (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    # FSDP2's hooks say how a state dict is put together.
    return not is_distributed(layer.weight) and any(vars(layer).get(name) for name in names)


def _odd_type(weight: Tensor) -> str | None:
    real = weight.is_floating_point() and weight.element_size() > 1
    return None if real else str(weight.dtype).removeprefix("torch.")


def _overriding(layer: nn.Module) -> str | None:
    if factorized_type(layer) is not None:
        return None
    return "this one" if has_own_forward(layer) else type(layer).__name__


SCRIPTED: Table = {
    "the layers of a scripted or traced model cannot be replaced; replace them first, then trace the model": (
        lambda part: isinstance(part, torch.jit.ScriptModule)
    ),
}
OFFLOADED: Table = {
    "accelerate keeps the values of {name} elsewhere; call accelerate.hooks.remove_hook_from_module(model, "
    "recurse=True) first": _is_offloaded,
}
IN_PIECES: Table = {
    "FSDP2 holds {name} in pieces, and its layer cannot be replaced; factorize the model before fully_shard, and merge "
    "what save_factorized saves of it": is_distributed,
}
LAZY: Table = {"{name} has no shape; run a batch through the model first": is_lazy}

TO_LIST = Use(SCRIPTED, {})
TO_READ = Use(OFFLOADED, {})
TO_REPLACE = Use(SCRIPTED, IN_PIECES)
TO_MERGE = Use(SCRIPTED | OFFLOADED, IN_PIECES)
TO_BUILD = Use(SCRIPTED | OFFLOADED, IN_PIECES | LAZY)
TO_SEND = Use(
    SCRIPTED | OFFLOADED,
    LAZY
    | {
        "{name} is of class {found}, which cannot be sent; quantize a model after training, and keep other state as "
        "extra state": _foreign_class,
        "{name} is {found}, which cannot be sent; make it dense with to_dense()": _layout,
        "{name} is {found}, which cannot be sent; convert it to a type that safetensors knows": (
            lambda entry: None if as_real(entry.resolve_conj()).dtype in TYPES else entry.dtype
        ),
        "{name} is a lazy conjugate, and cannot be averaged in place; call resolve_conj().resolve_neg()": (
            lambda entry: entry.is_conj() or entry.is_neg()
        ),
        "{name} is expanded, so that entries share memory, and cannot be averaged in place; clone it": _shares_memory,
        "{name} is made in inference mode, and cannot be averaged in place; build the model outside of it": (
            lambda entry: entry.is_inference()
        ),
    },
)
TO_SAVE = Use(
    OFFLOADED
    | {
        "{name} has extra state, which cannot be saved; remove it from this module": _has_extra_state,
        "a factor of {name} is computed (pruned, normalized or parametrized), so it could not be loaded; make it "
        "permanent with torch.nn.utils.prune.remove or parametrize.remove_parametrizations": (
            lambda part: isinstance(part, FactorizedLayer) and set(FACTORS) - part.state_dict().keys()
        ),
        "{name} has a tail, which belongs to one round; save the server's model": (
            lambda part: isinstance(part, FactorizedLayer) and part.tail is not None
        ),
    },
    {
        "{name} is of class {found}, and cannot be saved; quantize after loading": _foreign_class,
        "{name} is {found}, which safetensors lacks; make it dense with to_dense()": _layout,
        "{name} is {found}, which safetensors lacks; convert it": (
            lambda entry: None if entry.dtype in (*TYPES, torch.complex64) else entry.dtype
        ),
    },
)
LAYERS: Table = {  # of a `Candidate`: layers of a kind have the same words, by which a report counts them
    "factorized already; merge first": lambda it: isinstance(it.layer, FactorizedLayer),
    "in a packed attention: {found}": lambda it: it.context.reason_packed(it.name),
    "an adapter beside its base layer, small already": lambda it: it.context.is_adapter(it.name),
    "its weight is computed (parametrized, normalized or pruned)": lambda it: it.weight is None,
    "not initialized yet": lambda it: is_lazy(it.weight),
    "its weight is {found}": lambda it: _foreign_class(it.weight) or _odd_type(it.weight) or _layout(it.weight),
    "accelerate has hooked it; call accelerate.hooks.remove_hook_from_module(model, recurse=True)": (
        lambda it: hasattr(it.layer, "_hf_hook")
    ),
    "{found} overrides forward": lambda it: _overriding(it.layer),
    "{found} has extra state": lambda it: _has_extra_state(it.layer) and type(it.layer).__name__,
    "it has hooks on its state dict": lambda it: _has_state_hooks(it.layer),
    "an embedding with sparse gradients or max_norm": (
        lambda it: isinstance(it.layer, nn.Embedding) and (it.layer.sparse or it.layer.max_norm is not None)
    ),
    "an embedding with scale_grad_by_freq": (
        lambda it: isinstance(it.layer, nn.Embedding) and it.layer.scale_grad_by_freq
    ),
    "an embedding whose padding row is not zero": (
        lambda it: (
            isinstance(it.layer, nn.Embedding) and it.layer.padding_idx is not None and padding_row(it.layer) is None
        )
    ),
    "it holds more than a weight and a bias": (
        lambda it: set(it.layer._parameters) - {"weight", "bias"} or it.layer._buffers or it.layer._modules
    ),
    "its weight is tied to {found}": lambda it: it.tied("weight"),
    "its bias is tied to {found}": lambda it: it.tied("bias"),
    "a single term a group (depthwise convolution)": (
        lambda it: form_of(it.layer).rank <= 1 and num_blocks(it.layer) > 1
    ),
    "a single term": lambda it: form_of(it.layer).rank <= 1,
}


def check_supported(model: nn.Module, use: Use) -> None:
    """Raise a UserError with the sentence about the first module, or else the first entry of its state, that has one.

    Extra state is not looked at.
    """
    for name, module in named_modules(model):
        if sentence := find_sentence(use.modules, module, name or "this model"):
            raise UserError(sentence)
    for name, entry in named_state(model).items() if use.tensors else ():
        if name.rpartition(".")[2] != "_extra_state" and (sentence := find_sentence(use.tensors, entry, name)):
            raise UserError(sentence)


def find_sentence(table: Table, subject: object, name: str = "") -> str | None:
    """Return the first sentence of a table that applies, or None."""
    for sentence, test in table.items():
        if found := test(subject):
            return sentence.format(name=name, found=found)
    return None
