"""The content of messages between server and nodes, without pickle.

What a client trains of a shard is one NumPy vector for each type of numbers, of the same length both ways, in the one
`ArrayRecord`. So Flower's client mods that clip an update or add noise find it, and a message is a few objects, however
many layers there are. All else is bytes in the one `ConfigRecord`: indices, multipliers, the tail, and the frozen part
for a node that lacks it. Where some numbers are not in NumPy's types, as with a compression or in bfloat16, all of the
shard is one array of bytes, which such mods refuse.

Readers trust nothing: what is missing or invalid raises a `UserError`.
"""

import json
from collections.abc import Mapping
from io import BytesIO
from math import prod
from typing import Any, TypeVar

import httpx
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.lib import format as npy
from torch import Tensor

from sharding.errors import UserError, safe_repr
from sharding.rounds.codec import is_trained
from sharding.rounds.failures import FailureError, Kind, hint_at, one_line
from sharding.rounds.shard import Shard, Update
from sharding.transport import serialize
from sharding.transport.compression import EXACT
from sharding.validation import is_number

Part = TypeVar("Part", Shard, Update)

# The records of a message, by the keys of Flower's FedAvg, and one more.
ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
NODE = "node"  # what a node reports about itself
# In the record `config`, besides the user's values: all of a shard that is not trained, the names and shapes of what is
# trained, and the frozen part, which is also a record of a node's state.
PREFIX = "sharding."
REST, SHAPES, FROZEN = PREFIX + "rest", PREFIX + "shapes", PREFIX + "frozen"

NUMPY_FLOATS = {torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}  # names of the vectors
PACKED = "packed"  # the name of an array with a whole shard
STYPE = "spectral-sharding.shard"  # how to read that array's bytes; Flower does not look at them
NODE_UNAVAILABLE = 5  # Flower's code for a node that is not connected
LACKS = "this node lacks"  # in the error of a node that has to be sent again what it keeps
# Codes of errors in place of a reply that did not come, or that Flower cannot read; Flower's own codes are small.
LATE, UNSENT, UNREADABLE = 1000, 1001, 1002
UNREACHABLE = (httpx.HTTPError, OSError)  # what Flower raises without the SuperLink
KINDS = {LATE: Kind.LATE, UNSENT: Kind.FAILED, UNREADABLE: Kind.MALFORMED}


def pack(message: Shard | Update, values: Mapping[str, Any] | None = None) -> dict[str, ArrayRecord | ConfigRecord]:
    """Return the records of a shard or of an update, with the user's values in the record `config`."""
    config = dict(values or {})
    tensors, metadata = message.to_tensors()
    trained = {name: tensors[name] for name in sorted(tensors) if is_trained(name)}
    if message.compression != EXACT or any(tensor.dtype not in NUMPY_FLOATS for tensor in trained.values()):
        data = serialize.to_bytes(tensors, metadata)
        return {ARRAYS: ArrayRecord({PACKED: Array("uint8", (len(data),), STYPE, data)}), CONFIG: ConfigRecord(config)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in trained}
    arrays, shapes = ArrayRecord(), {}
    for dtype, kind in NUMPY_FLOATS.items():
        if parts := {name: tensor for name, tensor in trained.items() if tensor.dtype == dtype}:
            arrays[kind] = Array(torch.cat([part.detach().cpu().flatten() for part in parts.values()]).numpy())
            shapes[kind] = {name: list(part.shape) for name, part in parts.items()}
    config |= {REST: serialize.to_bytes(rest, metadata), SHAPES: json.dumps(shapes, separators=(",", ":"))}
    return {ARRAYS: arrays, CONFIG: ConfigRecord(config)}


def unpack(kind: type[Part], content: RecordDict) -> Part:
    """Read a shard or an update that `pack` has made; raise a UserError if there is none."""
    arrays, config = part_of(content, ARRAYS, ArrayRecord), content.get(CONFIG, {})
    if list(arrays) == [PACKED]:
        return kind.from_bytes(bytes(arrays[PACKED].data))
    if not isinstance(config, ConfigRecord) or REST not in config:
        raise UserError(f"arrays named {_names(arrays)!r}, where a shard is needed")
    rest, metadata = serialize.from_bytes(config[REST])
    return kind.from_tensors({**rest, **_split(arrays, config.get(SHAPES))}, metadata)


def _split(arrays: ArrayRecord, layout: Any) -> dict[str, Tensor]:
    """Cut vectors into tensors of these names and shapes, with memory of their own: some kernels round by alignment.

    Raise a UserError if they do not fit.
    """
    tensors: dict[str, Tensor] = {}
    try:
        shapes = serialize.shapes_in(layout)
        if shapes.keys() != arrays.keys():
            raise ValueError(f"vectors named {_names(arrays)}")
        for kind, named in shapes.items():
            lengths = [prod(shape) for shape in named.values()]
            parts = _vector(arrays[kind], kind, sum(lengths)).split(lengths)
            pairs = zip(named.items(), parts, strict=True)
            tensors |= {name: part.view(shape).clone() for (name, shape), part in pairs}
    except Exception as error:  # NumPy, torch and JSON raise many kinds
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"its arrays do not fit their names and shapes ({reason})") from error
    return tensors


def _vector(array: Array, kind: str, length: int) -> Tensor:
    """Return a vector of this type and length, or raise a ValueError if the bytes are another array.

    NumPy trusts the header of an array, and asks for its memory at once.
    """
    stream = BytesIO(array.data)
    if kind not in NUMPY_FLOATS.values() or npy.read_magic(stream) != (1, 0):
        raise ValueError(f"vectors of {kind[:40]!r}")
    shape, _, dtype = npy.read_array_header_1_0(stream)
    if shape != (length,) or dtype != kind or len(array.data) - stream.tell() != length * dtype.itemsize:
        raise ValueError(f"{len(array.data)} bytes for {dtype} of shape {safe_repr(shape)}, not {kind} of ({length},)")
    return torch.from_numpy(array.numpy())


def settings(config: ConfigRecord) -> ConfigRecord:
    """Return the user's values of a message's record `config`."""
    return ConfigRecord({name: value for name, value in config.items() if not name.startswith(PREFIX)})


def part_of(content: RecordDict, name: str, kind: type) -> Any:
    """Return a record of a message, or raise a UserError if there is none of that kind."""
    if not isinstance(content.get(name), kind):
        raise UserError(f"a message without {name!r}; it has {_names(content) or 'nothing'}")
    return content[name]


def content_of(reply: Message) -> RecordDict:
    """Return the content of a reply, or raise a FailureError if it is an error."""
    if not reply.has_error():
        return reply.content
    code, reason = reply.error.code, one_line(reply.error.reason)
    reason += hint_at(reason)
    if f"'{STYPE}'" in reason:  # Flower's own error, of a mod that reads arrays
        reason += (
            " (a mod of its app reads arrays, such as one of differential privacy; it needs weights in float32 and "
            "compression='float32')"
        )
    if code in KINDS:
        raise FailureError(KINDS[code], reason)
    kind = Kind.ABSENT if code == NODE_UNAVAILABLE else Kind.FAILED
    raise FailureError(kind, f"error {code}: {reason}")


def pull(grid: Grid, number: str) -> list[Message]:
    """Return the replies to a message that have come; raise a UserError if what a node sent is not a message."""
    try:
        return list(grid.pull_messages([number]))
    except UNREACHABLE:
        raise
    except Exception as error:  # any kind, since Flower does not check what nodes send before it reads it
        raise UserError(f"Flower cannot read its reply ({type(error).__name__}: {error})") from error


def metric_record(metrics: Any) -> MetricRecord:
    """Return metrics as a record; tensors and NumPy's numbers become Python's, and booleans 0 and 1.

    Raises:
        UserError: there are no metrics, or one is neither a number nor a list of numbers of one type.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(f"a client's function returned {safe_repr(metrics)}; return a dict with num-examples")
    record = MetricRecord()
    for name, value in metrics.items():
        try:
            record[name] = _python_number(value)
        except TypeError as error:
            raise UserError(
                f"the metric {name!r} is {safe_repr(value)}; return a number or a list of numbers"
            ) from error
    return record


def _python_number(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_python_number(each) for each in value]
    return int(value) if isinstance(value, bool) else value


def weight_of(metrics: Any, key: str) -> float:
    """Return the weight of a node's reply; raise a UserError unless it is a finite number above 0."""
    weight = metrics.get(key)
    if is_number(weight) and weight > 0:
        return float(weight)
    raise UserError(f"its metric {key!r} is {one_line(repr(weight))}; a client's function returns a number above 0")


def _names(record: RecordDict | ArrayRecord) -> str:
    return one_line(", ".join(map(str, record)))[:80]
