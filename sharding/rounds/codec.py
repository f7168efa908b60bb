"""The wire form of a shard and of an update: a safetensors file, whose keys say what each tensor is.

Keys are ``terms/<layer>/<part>``, ``dense/<name>`` and ``tail/<layer>/terms``; those of fixed tensors begin with
``frozen/``. With the compression ``int8`` the exponents of a tensor's vectors are in ``scales/<key>``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sharding.errors import UserError
from sharding.transport import serialize
from sharding.transport.compression import EXACT, Role, check_compression, compress, expand
from sharding.validation import is_number

ROLES: dict[str, Role] = {"indices": "indices", "u": "columns", "v": "columns", "multipliers": "numbers"}  # of terms
WHOLE, FIXED = "dense/", "frozen/"  # begin keys; committed numbers of bytes depend on these words
SCALES = "scales/"  # before the key of a tensor: the exponents of its vectors
CLIP = 10.0  # τ of a shard whose metadata has none
VALUES, CHANGES = "wire", "diff"  # the metadata's key of the compression: of values, or of changes of what was sent


@dataclass(frozen=True, eq=False, kw_only=True)
class Message:
    """What a file has: the fields of a `Shard`, which has no `changes`, or of an `Update`; terms by layer and part.

    An update has no `fixed`, `tail` and `clip`.
    """

    terms: Mapping[str, Mapping[str, Tensor]]
    whole: Mapping[str, Tensor]
    keep_ratio: float
    plan_id: str
    compression: str
    frozen_digest: str
    fixed: frozenset[str] = frozenset()
    tail: Mapping[str, Tensor] = field(default_factory=dict)
    clip: float | None = CLIP
    changes: bool = False


def encode(message: Message) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of the file."""
    return _compressed(_entries(message), message.compression), _metadata(message)


def size_of(message: Message) -> int:
    """Return the exact length of the file, without encoding."""
    entries = _entries(message)
    if message.compression != EXACT:  # else nothing is computed
        entries = ((name, role, tensor.to("meta")) for name, role, tensor in entries)
    return serialize.size_of(_compressed(entries, message.compression), _metadata(message))


def decode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Message:
    """Return what a file has.

    Names, types and shapes are checked against each other; values are not checked.

    Raises:
        UserError: the file is not a message.
    """
    keep_ratio, plan_id, frozen_digest, clip, compression, changes = _checked_metadata(metadata)
    terms: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    tail: dict[str, Tensor] = {}
    fixed = set()
    for entry, tensor in _expanded(tensors, compression).items():
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
    for layer in sorted(terms):
        _check_terms(layer, terms[layer])
    if other := sorted(tail.keys() - terms.keys()):
        raise UserError(f"it has a tail of {other[0][:80]!r} without terms")
    return Message(
        terms={layer: terms[layer] for layer in sorted(terms)},
        whole=whole,
        keep_ratio=keep_ratio,
        plan_id=plan_id,
        compression=compression,
        frozen_digest=frozen_digest,
        fixed=frozenset(fixed),
        tail=tail,
        clip=clip,
        changes=changes,
    )


def is_trained(entry: str) -> bool:
    """Whether a key is that of a tensor that clients train: u, v, or one that is sent whole and is not fixed."""
    kind, _, name = entry.partition("/")
    return entry.startswith(WHOLE) or (kind == "terms" and name.endswith(("/u", "/v")))


def _entries(message: Message) -> Iterator[tuple[str, Role, Tensor]]:
    """Yield the key, the role and the values of each tensor."""
    for layer, parts in message.terms.items():
        for part, role in ROLES.items():
            yield f"{FIXED if layer in message.fixed else ''}terms/{layer}/{part}", role, parts[part]
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


def _expanded(tensors: Mapping[str, Tensor], compression: str) -> Mapping[str, Tensor]:
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
    fields: dict[str, object] = {"keep_ratio": float(message.keep_ratio), "plan": message.plan_id}
    if message.frozen_digest:
        fields["residual"] = message.frozen_digest
    if message.clip != CLIP:
        fields["clip"] = message.clip
    if message.compression != EXACT:
        fields[CHANGES if message.changes else VALUES] = message.compression
    return {"shard": json.dumps(fields)}


def _check_terms(layer: str, parts: Mapping[str, Tensor]) -> None:
    """Check one layer's terms.

    Raises:
        UserError: their names, types or shapes do not fit together, or the indices do not ascend.
    """
    for part in ROLES:
        if part not in parts:
            raise UserError(f"it lacks {part!r} of layer {layer[:80]!r}")
    if len(parts) == len(ROLES) and all(parts[part].is_floating_point() for part in ("u", "v", "multipliers")):
        indices, u, v, multipliers = (parts[part] for part in ROLES)
        alike = u.dim() == v.dim() == 2 and indices.shape == multipliers.shape == u.shape[1:] == v.shape[1:]
        if alike and indices.dtype == torch.int64 and bool((indices >= 0).all() and (indices.diff() > 0).all()):
            return
    forms = ", ".join(
        f"{part[:20]} {str(tensor.dtype)[6:]}{list(tensor.shape)}" for part, tensor in sorted(parts.items())
    )
    raise UserError(f"layer {layer[:80]!r} has {forms[:200]}, or its indices do not ascend")


def _checked_metadata(metadata: Mapping[str, str]) -> tuple[float, str, str, float | None, str, bool]:
    """Return keep ratio, plan, digest of the frozen part, clip, compression and whether values are changes.

    Raises:
        UserError: they are missing or invalid.
    """
    try:
        fields = json.loads(metadata["shard"])
        keep_ratio, plan_id, frozen = fields["keep_ratio"], fields["plan"], fields.get("residual", "")
        clip = fields.get("clip", CLIP)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise UserError("its metadata has no keep ratio and plan") from error
    numbers = is_number(keep_ratio) and 0 < keep_ratio <= 1 and (clip is None or (is_number(clip) and clip >= 1))
    if not (numbers and isinstance(plan_id, str) and isinstance(frozen, str)):
        raise UserError(f"its metadata has {str(fields)[:80]}")
    changes = CHANGES in fields
    check_compression(compression := fields.get(CHANGES if changes else VALUES, EXACT))
    return float(keep_ratio), plan_id, frozen, clip, compression, changes
