"""Run the client's side of a round: build a small model from a shard, train it, and return the update.

A client cannot hold the dense model. It builds the model's structure with parameters that take no memory
(`init_empty`), and replaces each sharded layer by a factorized one with as many terms as the shard has. The client
decomposes nothing; all values come from the shard.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from sharding.errors import UserError, safe_repr
from sharding.factorization.support import TO_BUILD, check_supported
from sharding.factorization.unpack import unpack
from sharding.layers import FactorizedLayer
from sharding.layers.base import residual_layers
from sharding.layers.registry import factorize_empty
from sharding.modules.checkpointing import checkpoint_blocks
from sharding.modules.copies import check_has_values, meta_copy, meta_parameter
from sharding.modules.wrappers import key, named_modules, named_state
from sharding.rounds.failures import hint_at
from sharding.rounds.frozen import Frozen
from sharding.rounds.optim import DecayOf, can_be_fused, check_optimizer, clip_and_decay
from sharding.rounds.shard import Shard, Update
from sharding.validation import is_number, typed

Batch = tuple[Tensor, Tensor] | Mapping[str, Tensor]
AnyBatch = TypeVar("AnyBatch")


@typed
@torch.inference_mode(False)  # with gradients, also in a callback that runs without
def train_shard(
    model: nn.Module,
    shard: Shard,
    batches: Iterable[Batch],
    lr: float | None = None,
    *,
    frozen: Frozen | None = None,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    decay: float = 1e-4,
    decay_of: DecayOf = "bounded",
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    checkpoint: bool = False,
) -> Update:
    """Train a shard on a client's data, with one optimizer step a batch and the shard's clip, and return the update::

        train_shard(model, shard, batches, lr=0.1)
        train_shard(model, shard, batches, make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))

    Args:
        model: the structure, as for `client_model`; it is not changed.
        shard: the server's shard; it is not changed.
        batches: the batches of all epochs, in order. A batch is a pair (inputs, targets), or a dict of keyword
            arguments of a Hugging Face model that returns ``.loss``: ``{"input_ids": …, "labels": …}``.
        lr: the learning rate of this round, for SGD with a momentum of 0.9, which starts at zero in each round.
        frozen: the frozen part that the shard needs, as for `client_model`.
        make_optimizer: makes any other optimizer of the trainable parameters; give either `lr` or this.
        decay: the strength of the Frobenius decay.
        decay_of: the kind of decay, as for `clip_and_decay`.
        loss: for pairs, a function of the outputs (or of their ``.logits``) and the targets that returns a scalar.
        checkpoint: whether the model's blocks are computed again in the backward pass, for less memory and the same
            update; see `checkpoint_blocks`.

    Raises:
        UserError: as `client_model` and `clip_and_decay`, all parameters are frozen, both or neither of `lr` and
            `make_optimizer` are given, the optimizer needs a closure or wraps another one, there are no batches, a
            batch has no samples, the model returns no loss for a dict, or a batch norm gets a single sample.
    """
    if (lr is None) == (make_optimizer is None):
        raise UserError("give train_shard either lr=…, for SGD with momentum, or make_optimizer=…")
    trained = client_model(model, shard, frozen=frozen)
    if checkpoint:
        checkpoint_blocks(trained)
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("all parameters of the model are frozen, so there is nothing to train; set requires_grad")
    if make_optimizer is not None:
        optimizer = make_optimizer(parameters)
    elif is_number(lr) and lr >= 0:
        optimizer = SGD(parameters, lr, momentum=0.9, fused=can_be_fused(trained))
    else:
        raise UserError(f"lr is {safe_repr(lr)}; a finite number of at least 0 is needed")
    check_optimizer(optimizer)
    optimizer.register_step_pre_hook(clip_and_decay(trained, shard.clip, decay, decay_of))
    if not train_model(trained, batches, optimizer, partial(_loss_of, loss=loss)):
        raise UserError("there are no batches to train on; an iterator that is used up has none, so pass a new one")
    return shard.update_of(named_state(trained))


def train_model(
    model: nn.Module, batches: Iterable[AnyBatch], optimizer: Optimizer, loss: Callable[[nn.Module, AnyBatch], Tensor]
) -> list[Tensor]:
    """Train a client's model in place, with one step a batch, and return the loss of each step, scalars on the device.

    Args:
        model: a model with a shard's values.
        batches: the batches of all epochs, in order.
        optimizer: the optimizer of the parameters that train, with the hook of `clip_and_decay`.
        loss: a function of the model and a batch.
    """
    if not model.training:  # else parts in evaluation, such as frozen batch norms, stay so
        model.train()
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def _loss_of(model: nn.Module, batch: Batch, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if not isinstance(batch, Mapping | tuple | list) or (len(batch) < 2 and not isinstance(batch, Mapping)):
        raise UserError(f"a batch is {safe_repr(batch)}; pass pairs (inputs, targets), or dicts of keyword arguments")
    inputs = next(iter(batch.values()), None) if isinstance(batch, Mapping) else batch[0]
    if isinstance(inputs, Tensor) and inputs.shape[:1] == (0,):  # its loss is NaN, and its gradients are zero
        raise UserError("a batch has no samples; a client without data has nothing to train, so leave it out")
    try:
        outputs = model(**batch) if isinstance(batch, Mapping) else model(batch[0])
    except ValueError as error:
        if hint := hint_at(error):
            raise UserError(f"{error}{hint}") from error
        raise
    if not isinstance(batch, Mapping):
        return loss(getattr(outputs, "logits", outputs), batch[1])
    value: Tensor | None = getattr(outputs, "loss", None)
    if value is None:
        raise UserError(
            f"the model returned no loss for a batch with {', '.join(batch)}; add its targets as 'labels', and let it "
            "return an object with .loss (return_dict=True)"
        )
    return value


@typed
@torch.inference_mode(False)  # the result can train, in whatever mode it is made
@torch.no_grad()
def client_model(model: nn.Module, shard: Shard, copy: bool = True, frozen: Frozen | None = None) -> nn.Module:
    """Build the small model that trains a shard, with the shard's values, on the shard's device.

    Args:
        model: the structure of the dense model: built in `init_empty()`, on the `meta` device, or with values; or an
            earlier small model. It is not changed, and its weights are not copied.
        shard: a shard of any keep ratio, or the whole model (strategy ``dense``).
        copy: False lets the model use the shard's own tensors, which training then changes. This saves half the memory
            if the client no longer needs the shard. Use it for shards that came over the wire: those of a plan share
            their other tensors. A compressed shard is always copied, since an update is the change from it.
        frozen: the frozen part of the server's model, if the shard names one; it was received once. The model uses its
            tensors, on the shard's device.

    Raises:
        UserError: the shard is of another model (the message lists all names and shapes that differ), its frozen
            part is missing or another one, or a buffer that is not in the shard has no value.
    """
    check_supported(model, TO_BUILD)
    _check_frozen(shard, frozen)
    residuals = residual_layers(model).values()
    empty = _replace_layers(meta_copy(model, residuals), shard)
    frozen = frozen or Frozen({})
    device = next((value.device for value in (*shard.state().values(), *frozen.parameters.values())), None)
    if shard.frozen_digest or residuals:  # those of an earlier small model go
        frozen.load_into(empty, device)
    shard.load_into(empty, copy)
    check_has_values(empty, "the shard")
    return empty.to(device)


@contextmanager
def init_empty() -> Iterator[None]:
    """Build models inside this context with parameters on the `meta` device, which take no memory, and real buffers.

    Under ``torch.device("meta")`` the buffers that a model computes, such as a table of positions, have no values
    either. Models that other threads build at the same time are not affected.

    Raises:
        UserError: a constructor reads the values of parameters, as timm's SwinV2-CR does.
    """
    token = _EMPTIED.set({})
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if not re.search(r"\bmeta\b", str(error)):
            raise
        reason = f"a constructor reads parameters that have no values in init_empty() ({error})"
        raise UserError(
            f"{reason}; build this model outside init_empty(): a structure with values works, too"
        ) from error
    finally:
        _EMPTIED.reset(token)


# The parameters that the `init_empty` of this thread has replaced, by id; None outside of it.
_EMPTIED = ContextVar[dict[int, tuple[ref[nn.Parameter], nn.Parameter]] | None]("_EMPTIED", default=None)


def _register(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Return what a module gets in place of a parameter; None to leave it."""
    made = _EMPTIED.get()
    if made is None or is_lazy(parameter) or parameter.is_meta:
        return None
    if id(parameter) not in made or made[id(parameter)][0]() is not parameter:  # one that is tied stays tied
        made[id(parameter)] = ref(parameter), meta_parameter(parameter)
    return made[id(parameter)][1]


# Once and for good: while it comes or goes, no other thread can build a model, since torch iterates over its hooks.
register_module_parameter_registration_hook(_register)  # type: ignore[arg-type]  # torch's slip


def _replace_layers(model: nn.Module, shard: Shard) -> nn.Module:
    """Replace the layers that the shard has terms of by empty factorized ones, in place."""
    sent = shard.state()
    attentions = [name for name, part in named_modules(model) if isinstance(part, nn.MultiheadAttention)]
    if attentions:
        model = unpack(
            model, [name for name in attentions if any(part.startswith(key(name, "q_proj.")) for part in sent)]
        )
    modules = dict(named_modules(model, remove_duplicate=False))
    sizes = {layer: terms.indices.numel() for layer, terms in shard.terms.items()}
    for layer, n in sizes.items():
        if isinstance(module := modules.get(layer), FactorizedLayer) and module.num_terms != n:
            _resize(module, n)
    sizes = {layer: n for layer, n in sizes.items() if not isinstance(modules.get(layer), FactorizedLayer)}
    return factorize_empty(model, sizes)


def _resize(layer: FactorizedLayer, num_terms: int) -> None:
    """Let a factorized layer have another number of terms, without values, in place."""
    for side in ("u", "v"):
        if isinstance(factor := layer._parameters.get(side), nn.Parameter):
            empty = torch.empty(len(factor), num_terms, dtype=factor.dtype, device="meta")
            setattr(layer, side, nn.Parameter(empty, factor.requires_grad))
    layer.multipliers = layer.multipliers.new_empty(num_terms, device="meta")


def _check_frozen(shard: Shard, frozen: Frozen | None) -> None:
    if frozen is None and shard.frozen_digest:
        raise UserError(
            f"this shard needs the frozen part {shard.frozen_digest}, and the client has none: get the server's "
            "Server.frozen once, and pass frozen=…"
        )
    if frozen is not None and frozen.digest != shard.frozen_digest:
        needed = f"the frozen part {shard.frozen_digest}" if shard.frozen_digest else "no frozen part"
        raise UserError(
            f"this shard needs {needed}, and the client has {frozen.digest}, of another model or another start: get "
            "the present one from the server"
        )
