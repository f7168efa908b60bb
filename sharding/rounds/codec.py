"""The wire form of a shard and of an update: a safetensors file, whose keys say what each tensor is.

Keys are ``terms/<layer>/<part>``, ``dense/<name>`` and ``tail/<layer>/terms``; those of fixed tensors begin with
``frozen/``. With the compression ``int8`` the exponents of a tensor's vectors are in ``scales/<key>``. Keep ratio
and plan are in the metadata.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sharding.errors import UserError
from sharding.modules.wrappers import key
from sharding.transport import serialize
from sharding.transport.compression import EXACT, Role, check_compression, compress, expand
from sharding.transport.serialize import Metadata, Named
from sharding.validation import is_number

ROLES: dict[str, Role] = {"indices": "indices", "u": "columns", "v": "columns", "multipliers": "numbers"}  # of terms
WHOLE, FIXED = "dense/", "frozen/"  # begin keys; committed numbers of bytes depend on these words
SCALES = "scales/"  # before the key of a tensor: the exponents of its vectors
CLIP = 10.0  # τ of a shard whose metadata has none
VALUES, CHANGES = "wire", "diff"  # the metadata's key of the compression: of values, or of changes of what was sent


@dataclass(frozen=True, eq=False)
class Terms:
    """The singular terms of one layer that one client holds.

    Attributes:
        indices: the numbers of the terms in the spectrum, ascending, shape (n,), int64.
        u: u' of these terms, shape (out, n).
        v: v' of these terms, shape (in, n).
        multipliers: ω of these terms, shape (n,).
    """

    indices: Tensor
    u: Tensor
    v: Tensor
    multipliers: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Terms":
        """Return the terms with each tensor changed."""
        return Terms(*map(change, (self.indices, self.u, self.v, self.multipliers)))


@dataclass(frozen=True, eq=False)
class Message:
    """What a `Shard` and an `Update` have in common.

    `fixed`, `tail` and `clip` are arguments of a shard only, and `changes` of an update.

    Attributes:
        terms: the terms, by layer name.
        whole: the tensors that are sent whole, by state-dict key.
        keep_ratio: r that the shard was cut for; 1 where nothing is left out.
        plan_id: the name of its plan, ``<round>-<digest>``; an update's is that of its shard. Empty outside a plan.
        compression: the compression of its numbers in transport, one of `sharding.COMPRESSIONS`.
        frozen_digest: the digest of the `Frozen` that the client's model needs; empty where it needs none.
    """

    what: ClassVar[str]  # the name of the kind in errors

    terms: Mapping[str, Terms]
    whole: Mapping[str, Tensor]
    keep_ratio: float = 1.0
    fixed: frozenset[str] = field(default=frozenset(), init=False)
    plan_id: str = ""
    compression: str = EXACT
    changes: bool = field(default=False, init=False)
    frozen_digest: str = ""
    tail: Mapping[str, Tensor] = field(default_factory=dict, init=False)
    clip: float | None = field(default=CLIP, init=False)

    @property
    def nbytes(self) -> int:
        """The exact length of `to_bytes()`, computed without encoding."""
        entries = _entries(self)
        if self.compression != EXACT:  # else nothing is computed
            entries = ((name, role, tensor.to("meta")) for name, role, tensor in entries)
        return serialize.size_of(_compressed(entries, self.compression), _metadata(self))

    def to_bytes(self) -> bytes:
        """Return the wire form, a safetensors file with the keys of `sharding.rounds.codec`.

        Values that the compression cannot represent are rounded; a planner's shards are rounded already.
        """
        return serialize.to_bytes(*self.to_tensors())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read the wire form back, onto the CPU.

        Names, types and shapes are checked against each other; values are not checked.

        Raises:
            UserError: the bytes are not of this kind: no shard, or no update.
        """
        return cls.from_tensors(*serialize.from_bytes(data, cls.what))

    def to_tensors(self) -> tuple[Named, Metadata]:
        """Return the tensors and the metadata of the wire form."""
        return _compressed(_entries(self), self.compression), _metadata(self)

    @classmethod
    def from_tensors(cls, tensors: Named, metadata: Metadata) -> Self:
        """Read what `to_tensors` returned, with the checks and errors of `from_bytes`."""
        try:
            values = _decoded(tensors, metadata)
        except UserError as error:
            raise UserError(f"this is not a {cls.what}: {error}") from error
        cls._check(values)
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.init})

    @classmethod
    def _check(cls, values: Mapping[str, Any]) -> None:
        """Raise a UserError if these values, by field, are of the other kind."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        """Return the same values on a device."""
        return self.map(lambda part: part.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the message with each tensor changed, one after the other."""
        terms = {name: each.map(change) for name, each in self.terms.items()}
        return replace(self, terms=terms, whole={name: change(part) for name, part in self.whole.items()})

    def trained(self) -> dict[str, Tensor]:
        """Return what a client trains: u and v of every layer, as ``<layer>.<part>``, and what is sent whole."""
        factors = {
            key(layer, part): getattr(terms, part)
            for layer, terms in self.terms.items()
            for part in "uv"
            if layer not in self.fixed
        }
        return factors | {name: tensor for name, tensor in self.whole.items() if name not in self.fixed}


def is_trained(entry: str) -> bool:
    """Whether a key is that of a tensor that clients train: u, v, or one that is sent whole and is not fixed."""
    kind, _, name = entry.partition("/")
    return entry.startswith(WHOLE) or (kind == "terms" and name.endswith(("/u", "/v")))


def _decoded(tensors: Named, metadata: Metadata) -> dict[str, Any]:
    """Return the values of a message by field, with the checks and errors of `Message.from_bytes`."""
    labels = _checked_metadata(metadata)
    terms: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    tail: dict[str, Tensor] = {}
    fixed = set()
    for entry, tensor in _expanded(tensors, labels["compression"]).items():
        kind, _, name = entry.removeprefix(FIXED).partition("/")
        if kind == "terms":
            name, _, part = name.rpartition("/")
            terms.setdefault(name, {})[part] = tensor
        elif kind == "tail" and entry.endswith("/terms"):
            tail[name.removesuffix("/terms")] = tensor
        elif kind == "dense" and name not in whole and (tensor.is_floating_point() or entry.startswith(FIXED)):
            whole[name] = tensor
        else:
            raise UserError(f"unknown entry {entry[:80]!r}, {tensor.dtype}")
        if entry.startswith(FIXED):
            fixed.add(name)
    of_layers = {layer: _checked_terms(layer, terms[layer]) for layer in sorted(terms)}
    if other := sorted(tail.keys() - terms.keys()):
        raise UserError(f"it has a tail of {other[0][:80]!r} without terms")
    return {"terms": of_layers, "whole": whole, "fixed": frozenset(fixed), "tail": tail, **labels}


def _entries(message: Message) -> Iterator[tuple[str, Role, Tensor]]:
    """Yield the key, the role and the values of each tensor."""
    for layer, terms in message.terms.items():
        for part, role in ROLES.items():
            yield f"{FIXED if layer in message.fixed else ''}terms/{layer}/{part}", role, getattr(terms, part)
    for layer, stored in message.tail.items():
        yield f"tail/{layer}/terms", "numbers", stored
    for name, tensor in message.whole.items():
        yield f"{FIXED if name in message.fixed else ''}{WHOLE}{name}", "outputs", tensor


def _compressed(entries: Iterable[tuple[str, Role, Tensor]], compression: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, role, tensor in entries:
        tensors[name], scales = compress(tensor, role, compression)
        if scales is not None:
            tensors[SCALES + name] = scales
    return tensors


def _role(entry: str) -> Role:
    kind, _, name = entry.removeprefix(FIXED).partition("/")
    return "outputs" if kind == "dense" else ROLES.get(name.rpartition("/")[2], "numbers")


def _expanded(tensors: Named, compression: str) -> Named:
    """Return the tensors of the message by their keys, without their scales."""
    if compression == EXACT:
        return tensors
    scales = {name.removeprefix(SCALES): tensor for name, tensor in tensors.items() if name.startswith(SCALES)}
    if other := sorted(name for name in scales if name not in tensors):
        raise UserError(f"the scales of {other[0][:80]!r} are not its own")
    return {
        name: expand(tensor, _role(name), compression, scales.get(name), name)
        for name, tensor in tensors.items()
        if not name.startswith(SCALES)
    }


def _metadata(message: Message) -> dict[str, str]:
    # One entry, since safetensors writes several in any order.
    labels: dict[str, object] = {"keep_ratio": float(message.keep_ratio), "plan": message.plan_id}
    if message.frozen_digest:
        labels["residual"] = message.frozen_digest
    if message.clip != CLIP:
        labels["clip"] = message.clip
    if message.compression != EXACT:
        labels[CHANGES if message.changes else VALUES] = message.compression
    return {"shard": json.dumps(labels)}


def _checked_terms(layer: str, parts: Mapping[str, Tensor]) -> Terms:
    """Return one layer's terms; raise a UserError if the tensors do not fit together or the indices do not ascend."""
    for part in ROLES:
        if part not in parts:
            raise UserError(f"it lacks {part!r} of layer {layer[:80]!r}")
    if len(parts) == len(ROLES) and all(parts[part].is_floating_point() for part in ("u", "v", "multipliers")):
        indices, u, v, multipliers = (parts[part] for part in ROLES)
        alike = u.dim() == v.dim() == 2 and indices.shape == multipliers.shape == u.shape[1:] == v.shape[1:]
        if alike and indices.dtype == torch.int64 and bool((indices >= 0).all() and (indices.diff() > 0).all()):
            return Terms(indices, u, v, multipliers)
    forms = ", ".join(
        f"{part[:20]} {str(tensor.dtype)[6:]}{list(tensor.shape)}" for part, tensor in sorted(parts.items())
    )
    raise UserError(f"layer {layer[:80]!r} has {forms[:200]}, or its indices do not ascend")


def _checked_metadata(metadata: Metadata) -> dict[str, Any]:
    """Return keep ratio, plan, digest of the frozen part, clip, compression and whether values are changes, by field.

    Raise a UserError if they are missing or invalid.
    """
    try:
        labels = json.loads(metadata["shard"])
        keep_ratio, plan_id, frozen = labels["keep_ratio"], labels["plan"], labels.get("residual", "")
        clip = labels.get("clip", CLIP)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise UserError("its metadata has no keep ratio and plan") from error
    numbers = is_number(keep_ratio) and 0 < keep_ratio <= 1 and (clip is None or (is_number(clip) and clip >= 1))
    if not (numbers and isinstance(plan_id, str) and isinstance(frozen, str)):
        raise UserError(f"its metadata has {str(labels)[:80]}")
    changes = CHANGES in labels
    check_compression(compression := labels.get(CHANGES if changes else VALUES, EXACT))
    named = {"plan_id": plan_id, "frozen_digest": frozen, "clip": clip, "compression": compression, "changes": changes}
    return {"keep_ratio": float(keep_ratio), **named}
