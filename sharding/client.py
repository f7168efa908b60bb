"""A client's side of a round: its small model from a shard, the training, and the update that goes back.

A client cannot hold the dense model. It has the model's structure, with parameters that take no memory (`init_empty`),
and puts factorized layers of as many terms as the shard has in the place of the layers that are sharded. Nothing is
decomposed; the only values are those of the shard.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from sharding.errors import UserError
from sharding.factorization import factorize_empty
from sharding.factorization.unpack import unpack
from sharding.layers import FactorizedLayer
from sharding.modules.copies import hollow, hollow_copy
from sharding.modules.state import as_real, key
from sharding.optim import DecayOf, LocalSGD
from sharding.shard import Shard
from sharding.transport.compression import EXACT


def train_shard(
    model: nn.Module,
    shard: Shard,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    momentum: float = 0.9,
    frobenius_decay: float = 1e-4,
    clip: float | None = 10.0,
    decay_of: DecayOf = "bounded",
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    optimizer: type[LocalSGD] = LocalSGD,
) -> Shard:
    """Train a shard on a client's data, and return the update: one step of its optimizer a batch.

    Args:
        model: as for `client_model`; it stays as it is.
        shard: what the server sent; it stays as it is.
        batches: (inputs, targets) in the order of their use, all epochs.
        lr: the learning rate of this round.
        momentum: of SGD, fresh each round.
        frobenius_decay: see `LocalSGD`.
        clip: τ, or None where the strategy does not clip.
        decay_of: what decays, see `decay_multipliers`.
        loss: of outputs and targets, a scalar.
        optimizer: `LocalSGD`, or `ScaledSGD`.

    Raises:
        UserError: as `client_model` and `LocalSGD`.
    """
    small = client_model(model, shard).train()
    steps = optimizer(small, lr, momentum, frobenius_decay, clip, decay_of)
    for inputs, targets in batches:
        steps.step(loss(small(inputs), targets))
    return shard.read_from(small)


@torch.no_grad()
def client_model(model: nn.Module, shard: Shard, copy: bool = True) -> nn.Module:
    """Return the small model that a shard is trained in, with the shard's values, on the shard's device.

    Args:
        model: the dense model, for its structure only: built in `init_empty()`, on the `meta` device, or any other; or
            an earlier small model. It stays as it is, and none of its weights is copied.
        shard: of any keep ratio, or the whole model (strategy ``dense``).
        copy: False lets the model take the shard's own tensors over, which then change in training: half the memory,
            for a client that has received the shard and does not need it again. On a wire that rounds the shard stays
            as it is all the same: an update is the change from it.

    Raises:
        UserError: the shard is one of another model; all names and shapes that differ are told. Or a buffer that is
            not in the shard has no value.
    """
    small = _replace_layers(hollow_copy(model), shard)
    slots = shard.matching_state(small)
    filled: dict[int, Tensor] = {}
    for name, value in shard.state().items():
        slot = slots[name]
        filled[id(slot)] = _fill(slot, value, copy or shard.compression != EXACT)
        if isinstance(slot, nn.Parameter):
            trains = slot.requires_grad and not shard.is_frozen(name)
            filled[id(slot)] = nn.Parameter(filled[id(slot)], trains)
    for module in small.modules():
        for entries in cast(list[dict[str, Any]], [module._parameters, module._buffers]):
            entries.update({key: filled[id(entry)] for key, entry in entries.items() if id(entry) in filled})
    _reset_counters(small)
    _refuse_empty(small)
    return small.to(next(iter(filled.values())).device) if filled else small


@contextmanager
def init_empty() -> Iterator[None]:
    """Build models whose parameters are on the `meta` device, where they take no memory, and whose buffers are real.

    Under ``torch.device("meta")`` buffers that a model computes for itself, such as a table of positions, would have no
    values either. What other threads build meanwhile is hollow as well.

    Raises:
        UserError: a constructor reads the values of parameters, as timm's SwinV2-CR does.
    """

    def register(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        keep = is_lazy(parameter) or parameter.is_meta  # one that is tied stays tied
        return None if keep else hollow(parameter)

    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]  # torch's slip
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        why = f"a constructor reads parameters that have no values in init_empty() ({error})"
        raise UserError(f"{why}; build this model outside of it: any structure with values will do") from error
    finally:
        handle.remove()


def _replace_layers(model: nn.Module, shard: Shard) -> nn.Module:
    """Put empty factorized layers in the place of those that the shard has terms of, in place."""
    sent = shard.state()
    attentions = [name for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)]
    model = unpack(model, [name for name in attentions if any(part.startswith(key(name, "q_proj.")) for part in sent)])
    modules = dict(model.named_modules(remove_duplicate=False))
    _refuse_fused(modules, sent)
    sizes = {layer: terms.indices.numel() for layer, terms in shard.terms.items()}
    sizes = {layer: n for layer, n in sizes.items() if not isinstance(modules.get(layer), FactorizedLayer)}
    return factorize_empty(model, sizes, inplace=True)


def _refuse_fused(modules: Mapping[str, nn.Module], sent: Iterable[str]) -> None:
    """Raise a UserError if the shard has layers in parts that the model has in one."""
    split = dict.fromkeys(name.rpartition(".parts.")[0] for name in sent if ".parts." in name)
    fused = [name for name in split if name in modules and not modules[name]._modules]
    if fused:
        raise UserError(
            f"the shard has {', '.join(fused)} in parts; call sharding.split_layers on the client's model, "
            "as on the server's"
        )


def _fill(slot: Tensor, value: Tensor, copy: bool) -> Tensor:
    """Return a tensor in the dtype and layout of an empty one, with the values of a shard's."""
    if not copy and value.dtype == slot.dtype:
        return value
    filled = torch.empty_strided(slot.shape, slot.stride(), dtype=slot.dtype, device=value.device)
    as_real(filled).copy_(value)
    return filled


def _reset_counters(model: nn.Module) -> None:
    """Let batch norms on the `meta` device start counting their batches, as each client does for itself."""
    for module in model.modules():
        counter = getattr(module, "num_batches_tracked", None)
        if isinstance(module, _BatchNorm) and isinstance(counter, Tensor) and counter.is_meta:
            module.num_batches_tracked = torch.zeros_like(counter, device="cpu")


def _refuse_empty(model: nn.Module) -> None:
    empty = [
        name for named in (model.named_parameters(), model.named_buffers()) for name, part in named if part.is_meta
    ]
    if empty:
        raise UserError(
            f"no shard has values for {', '.join(empty)}, which the model has on the meta device; "
            "build it in `with sharding.init_empty():`, which leaves buffers real, or give a structure with values"
        )
