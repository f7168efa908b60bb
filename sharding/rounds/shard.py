"""The messages between server and client: a `Shard` goes out, and an `Update` comes back.

A shard has singular terms of the sharded layers, and all other tensors whole, but for frozen parameters: `Frozen` has
those, and is sent once. Terms of frozen layers, integers and masks are fixed: they are sent but not returned, since a
client computes with the server's, and they are not averaged. With a compression that rounds
(`sharding.transport.compression`), what is sent is rounded, and clients return changes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.factorization.support import TO_READ, check_supported
from sharding.layers import FactorizedLayer
from sharding.layers.base import residual_layers
from sharding.matrices.values import as_real, computable, difference
from sharding.modules.copies import load
from sharding.modules.state import batch_counters, is_transmitted
from sharding.modules.wrappers import full_tensor, key, named_modules, named_state
from sharding.rounds.codec import CLIP, Message
from sharding.rounds.frozen import digest_of
from sharding.transport import serialize
from sharding.transport.compression import EXACT, round_columns, round_outputs


@dataclass(frozen=True, eq=False)
class Shard(Message):
    """One client's part of the model in one round.

    Its other attributes are those of `Message`.

    Attributes:
        whole: everything else in the state dict (first and last layers, norms, biases, embeddings), by state-dict key,
            except what is in `Frozen`, extra state, and the counters of batch norms, which belong to each model. The
            shards of a round share these tensors, which are never written to.
        fixed: the names in `terms` and `whole` that are neither trained nor sent back; integers always are.
        tail: by layer, the terms that only stronger clients of the round train, which the client holds frozen, as
            `sharding.matrices.quantization.quantize_terms` stores them. It is not returned.
        clip: τ with which the client trains, see `sharding.clip_and_decay`; None for no clipping.
    """

    what = "shard"

    fixed: frozenset[str] = frozenset()
    tail: Mapping[str, Tensor] = field(default_factory=dict)
    clip: float | None = CLIP

    def __repr__(self) -> str:
        num_terms = sum(terms.indices.numel() for terms in self.terms.values())
        return (
            f"Shard(keep_ratio={self.keep_ratio:g}, layers={len(self.terms)}, terms={num_terms}, "
            f"{self.nbytes / 1000:,.0f} kB, plan_id={self.plan_id[:7]!r})"
        )

    @classmethod
    def _check(cls, values: Mapping[str, Any]) -> None:
        if values["changes"]:
            raise UserError("this is not a shard: its values are changes")

    def write(self, path: Path | str) -> None:
        """Write the wire form to a file."""
        serialize.to_file(*self.to_tensors(), path)

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a file of the wire form, onto the CPU; the file is mapped, not copied.

        Raises:
            UserError: the file is not a shard.
        """
        return cls.from_tensors(*serialize.from_file(path))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the shard with each tensor changed, one after the other."""
        return replace(super().map(change), tail={name: change(part) for name, part in self.tail.items()})

    def state(self) -> dict[str, Tensor]:
        """Return all values by their names in the state dict of a client's model: ``<layer>.u`` and so on."""
        factors = {
            key(layer, part): getattr(terms, part)
            for layer, terms in self.terms.items()
            for part in ("u", "v", "multipliers")
        }
        return factors | dict(self.whole)

    def is_fixed(self, name: str) -> bool:
        """Whether a name of `state` belongs to a fixed layer or tensor."""
        return (name if name in self.whole else name.rpartition(".")[0]) in self.fixed

    @property
    def update_nbytes(self) -> int:
        """The exact length of the bytes of an update of this shard, of which no value is read."""
        return self.returned(self.trained()).nbytes

    @torch.no_grad()
    def returned(self, values: Mapping[str, Tensor]) -> "Update":
        """Return the update with these values, by the names of `trained`.

        Its types are those of the shard, whatever the client computes in. With compression it holds the rounded changes
        of these values.
        """
        trained = self.trained()
        values = {name: values[name].to(sent.dtype) for name, sent in trained.items()}
        if changes := self.compression != EXACT:
            for name, sent in trained.items():
                rounded = round_outputs if name in self.whole else round_columns
                values[name] = rounded(difference(values[name], sent), self.compression)
        terms = {
            layer: replace(sent, u=values[key(layer, "u")], v=values[key(layer, "v")])
            for layer, sent in self.terms.items()
            if layer not in self.fixed
        }
        whole = {name: values[name] for name in self.whole if name not in self.fixed}
        return Update(terms, whole, self.keep_ratio, self.plan_id, self.compression, changes, self.frozen_digest)

    def matching_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and buffers of a client's model by name, with the checks and errors of `load_into`."""
        state = {name: part for name, part in named_state(model).items() if is_transmitted(name, part)}
        problems = list(self._misfits(model, state))
        if problems:
            raise UserError(
                f"the shard (keep ratio {self.keep_ratio:g}) does not fit the model: {'; '.join(problems)}. "
                "sharding.client_model(model, shard) makes the model that fits"
            )
        return state

    @torch.no_grad()
    def load_into(self, model: nn.Module, copy: bool = True) -> None:
        """Copy this shard's values into a client's model, plain or inside DDP, `torch.compile` or FSDP2.

        What is fixed in the shard is frozen in the model, too. The model's layers get the shard's tail, or none. Batch
        norms count from zero again. Parameters and buffers on the `meta` device get memory, on the shard's device.

        Args:
            model: a model with the shard's names, shapes and numbers of terms.
            copy: False lets entries on the `meta` device be the shard's own tensors, as for `client_model`.

        Raises:
            UserError: names, shapes or numbers of terms differ from the model's; the message lists all of them.
        """
        state, values = self.matching_state(model), self.state()
        for name in filter(self.is_fixed, values):
            state[name].requires_grad_(False)
        pairs = [(state[name], value) for name, value in values.items()]
        pairs += [(counter, torch.zeros_like(counter, device="cpu")) for counter in batch_counters(model)]
        load(model, pairs, copy or self.compression != EXACT)  # an update is the change from what was sent
        modules = dict(named_modules(model, remove_duplicate=False))
        for layer in self.terms:
            module, stored = modules[layer], self.tail.get(layer)
            assert isinstance(module, FactorizedLayer)
            module.tail = None if stored is None else stored.to(module.multipliers.device)

    @torch.no_grad()
    def read_from(self, model: nn.Module) -> "Update":
        """Return the update: the same terms and names, with the model's current values.

        Raises:
            UserError: as `load_into`.
        """
        check_supported(model, TO_READ)
        return self.update_of(self.matching_state(model))

    @torch.no_grad()
    def update_of(self, state: Mapping[str, Tensor]) -> "Update":
        """Return the update with the values of a client's model, by their names in `named_state`."""
        return self.returned({name: _now(state[name].detach(), sent) for name, sent in self.trained().items()})

    def _misfits(self, model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[str]:
        """Describe each difference between the names and shapes of the shard and those of the model."""
        modules, seen = dict(named_modules(model, remove_duplicate=False)), set()
        layers, expected = residual_layers(model), self.frozen_digest.partition("-")[0]
        if (layers or expected) and (digest := digest_of(layers)) != expected:
            yield f"its layers have {f'the residual {digest}' if layers else 'no residual'}, not {expected or 'none'}"
        for layer, terms in self.terms.items():
            seen |= {key(layer, "residual"), key(layer, "tail")}
            module, n = modules.get(layer), terms.indices.numel()
            if not isinstance(module, FactorizedLayer):
                yield f"{layer} is {'not there' if module is None else f'a {type(module).__name__}, not factorized'}"
            elif module.num_terms != n:
                yield f"{layer} has {module.num_terms} terms, not {n}"
            elif layer in self.tail and not module.can_add(self.tail[layer], by_terms=True):
                yield f"the tail of {layer} does not fit this {type(module).__name__}"
            else:
                continue
            seen |= {key(layer, part) for part in ("u", "v", "multipliers", "weight")}
        sent = self.state()
        for name in (name for name in sent if name not in seen):
            if name not in state:
                yield f"{name} is not there"
            elif as_real(state[name]).shape != sent[name].shape:
                yield f"{name} has shape {tuple(state[name].shape)}, not {tuple(sent[name].shape)}"
        known = {id(state[name]) for name in sent if name in state}  # tied parameters have more names than in the shard
        if self.frozen_digest:  # which has the frozen ones
            known |= {id(part) for part in state.values() if isinstance(part, nn.Parameter) and not part.requires_grad}
        yield from (
            f"{name} is not in the shard" for name in state if id(state[name]) not in known and name not in seen
        )


@dataclass(frozen=True, eq=False)
class Update(Message):
    """What a client sends back: all that it trained of its shard.

    Its other attributes are those of `Message`, and the shard's.

    Attributes:
        terms: the trained terms, by layer name; their indices and ω are those of the shard.
        whole: the tensors that were trained whole, by state-dict key.
        changes: whether u, v and `whole` are changes from what was sent, as with a compression that rounds, or new
            values.
    """

    what = "client's update"

    changes: bool = False

    def __repr__(self) -> str:
        size = self.nbytes / 1000
        return f"Update(layers={len(self.terms)}, {size:,.0f} kB, plan_id={self.plan_id[:7]!r})"

    @classmethod
    def _check(cls, values: Mapping[str, Any]) -> None:
        if fixed := sorted(values["fixed"] | values["tail"].keys()):
            raise UserError(f"fixed tensors were returned: {', '.join(fixed[:3])[:200]}")


def _now(slot: Tensor, sent: Tensor) -> Tensor:
    """Return a model's value in the type and on the device that was sent.

    A model in a smaller type rounded what was sent. Its change since then counts, not that rounding.
    """
    value = as_real(full_tensor(slot)).to(sent.device, copy=True)
    if value.dtype == sent.dtype or value.element_size() > sent.element_size():
        return value.to(sent.dtype)
    change = difference(value.to(sent.dtype), sent.to(value.dtype).to(sent.dtype))
    return (computable(sent) + computable(change)).to(sent.dtype)
