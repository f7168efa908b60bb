"""The content of messages between server and nodes: a shard or a frozen part is one array of bytes, without pickle.

Readers trust nothing: what is missing or invalid raises a `UserError`.
"""

from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from sharding.errors import UserError, safe_repr
from sharding.rounds.failures import FailureError, Kind, hint_at, one_line
from sharding.rounds.frozen import Frozen
from sharding.rounds.shard import Shard, Update
from sharding.validation import is_number

# The records of a message, by the keys of Flower's FedAvg, and two more.
ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
FROZEN = "frozen"  # in a message from the server, and in a node's state
NODE = "node"  # what a node reports about itself

SHARD = "shard"  # the name of the array
STYPE = "spectral-sharding.shard"  # how to read an array's bytes; Flower does not look at them
NODE_UNAVAILABLE = 5  # Flower's code for a node that is not connected
LACKS = "this node lacks"  # in the error of a node that has to be sent again what it keeps
# Codes of errors in place of a reply that did not come, or that Flower cannot read; Flower's own codes are small.
LATE, UNSENT, UNREADABLE = 1000, 1001, 1002
KINDS = {LATE: Kind.LATE, UNSENT: Kind.FAILED, UNREADABLE: Kind.MALFORMED}


def pack(message: Shard | Update | Frozen) -> ArrayRecord:
    """Return a shard, an update or a frozen part as one array."""
    data = message.to_bytes()
    return ArrayRecord({SHARD: Array("uint8", (len(data),), STYPE, data)})


def bytes_of(record: ArrayRecord) -> bytes:
    """Return the bytes of an array that `pack` made.

    Raises:
        UserError: the record has other arrays.
    """
    if list(record) != [SHARD]:
        raise UserError(f"arrays named {_names(record)!r}, where a shard is needed")
    return bytes(record[SHARD].data)


def part_of(content: RecordDict, name: str, kind: type) -> Any:
    """Return a record of a message.

    Raises:
        UserError: there is no such record of that kind.
    """
    if not isinstance(content.get(name), kind):
        raise UserError(f"a message without {name!r}; it has {_names(content) or 'nothing'}")
    return content[name]


def content_of(reply: Message) -> RecordDict:
    """Return the content of a reply.

    Raises:
        FailureError: the reply is an error.
    """
    if not reply.has_error():
        return reply.content
    code, reason = reply.error.code, one_line(reply.error.reason)
    reason += hint_at(reason)
    if f"'{STYPE}'" in reason:  # Flower's own error, of a mod that reads arrays
        reason += " (a mod of its app reads arrays, such as one of differential privacy, and cannot read a shard)"
    if code in KINDS:
        raise FailureError(KINDS[code], reason)
    kind = Kind.ABSENT if code == NODE_UNAVAILABLE else Kind.FAILED
    raise FailureError(kind, f"error {code}: {reason}")


def pull(grid: Grid, number: str) -> list[Message]:
    """Return the replies to a message that have come.

    Raises:
        UserError: what the node sent is not a message.
    """
    try:
        return list(grid.pull_messages([number]))
    except (httpx.HTTPError, OSError):  # of the SuperLink
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
    """Return the weight of a node's reply.

    Raises:
        UserError: it is missing, or not a finite number above 0.
    """
    weight = metrics.get(key)
    if is_number(weight) and weight > 0:
        return float(weight)
    raise UserError(f"its metric {key!r} is {one_line(repr(weight))}; a client's function returns a number above 0")


def _names(record: RecordDict | ArrayRecord) -> str:
    return one_line(", ".join(map(str, record)))[:80]
