"""Messages between server and nodes: a shard's own wire form in one array, a few plain values, and no pickle.

Readers trust nothing: bytes that are not a shard, and missing or invalid values, raise a `UserError`.
"""

import json
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Self

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as checked

from sharding import Residual, Shard
from sharding.errors import UserError
from sharding.failures import FailureError, Kind, one_line
from sharding.shard import update_norm
from train.config.schema import Config, check_config
from train.engines import Update

STYPE = "spectral-sharding.shard"  # how to read an array's bytes; Flower does not look at them
RESIDUAL = "residual"  # the record of the residual, in a message and in a node's state
UPLOAD = "train.upload"  # the kind of message that asks a node for the update it keeps


@dataclass(frozen=True)
class TrainRequest:
    """A node's task in a round.

    Attributes:
        residual: that the shard needs, if the node may lack it; the node keeps it.
    """

    config: Config
    shard: Shard
    round: int
    lr: float
    residual: Residual | None = None

    def to_record(self) -> RecordDict:
        """Return the content of a message."""
        values = {"round": self.round, "lr": self.lr, "config": config_text(self.config)}
        record = RecordDict({"shard": pack(self.shard), "values": ConfigRecord(values)})
        if self.residual is not None:
            record[RESIDUAL] = pack(self.residual)
        return record

    @classmethod
    def from_record(cls, content: RecordDict) -> Self:
        """Read the content of a message, which the server has sent.

        Raises:
            UserError: `to_record` did not make it.
        """
        values, shard = content["values"], unpack(content["shard"])
        residual = read_residual(content) if RESIDUAL in content else None
        return cls(read_config(values["config"]), shard, values["round"], values["lr"], residual)


@checked(frozen=True, config={"strict": True})
class NodeInfo:
    """Which client a node is, and what it can afford.

    Attributes:
        partition: the client that it is, from 0.
        keep_ratio: r that it can afford.
        num_samples: D_c.
    """

    partition: Annotated[int, Field(ge=0)]
    keep_ratio: Annotated[float, Field(gt=0, le=1)]
    num_samples: Annotated[int, Field(ge=1, lt=2**53)]

    def to_record(self) -> RecordDict:
        """Return the content of a message."""
        return RecordDict({"card": ConfigRecord(dict(vars(self)))})

    @classmethod
    def from_record(cls, content: RecordDict) -> Self:
        """Read the content of a message.

        Raises:
            UserError: `to_record` did not make it, or a value is invalid.
        """
        values = part_of(content, "card", ConfigRecord)
        try:
            return cls(**values)
        except (ValidationError, TypeError) as error:
            said = one_line(", ".join(f"{key}={value!r}" for key, value in values.items()))
            raise UserError(
                f"it reports {said}; partition must be at least 0, keep_ratio above 0 and at most 1, and num_samples "
                "at least 1"
            ) from error


def reply_record(update: Update) -> RecordDict:
    """Return the content of a node's reply."""
    if update.shard is None:
        return RecordDict({"failure": ConfigRecord({"why": str(update.failure or "")})})
    loss = float("nan") if update.loss is None else float(update.loss)
    return RecordDict({"shard": pack(update.shard), "values": ConfigRecord({"loss": loss})})


def read_reply(content: RecordDict) -> Update:
    """Read a node's reply; it need not fit the round.

    Raises:
        UserError: `reply_record` did not make it, or it reports a failure.
    """
    loss = part_of(content, "values", ConfigRecord).get("loss")
    if not isinstance(loss, float):
        raise UserError(f"its loss is {one_line(repr(loss))}, not a number")
    return Update(unpack(part_of(content, "shard", ArrayRecord)), torch.tensor(loss) if isfinite(loss) else None)


def read_norm(content: RecordDict) -> float:
    """Read the report of a node that keeps its update: the norm ‖U‖/lr, which may not be finite.

    Raises:
        UserError: there is no valid norm, or the message reports a failure.
    """
    norm = part_of(content, "report", ConfigRecord).get("norm")
    if not isinstance(norm, float) or norm < 0:
        raise UserError(f"its norm is {one_line(repr(norm))}, not a number of at least 0")
    return norm


def norm_of(sent: Shard, returned: Shard, lr: float) -> float:
    """Return ‖U‖/lr, with the bits of `train.engines.Engine.report`."""
    return float(torch.stack([update_norm(sent, returned)]) / lr)


def config_text(config: Config) -> str:
    """Return the configuration for a node: all keys but those of the server's output."""
    return config.model_dump_json(exclude={"output", "tracker"})


def read_config(text: str) -> Config:
    """Return the configuration that a server has sent.

    Raises:
        UserError: it is invalid.
    """
    return check_config(json.loads(text))


def read_residual(content: RecordDict) -> Residual:
    """Return the residual of a message, or of a node's state.

    Raises:
        UserError: there is none, or it is spoiled.
    """
    return Residual.from_bytes(part_of(content, RESIDUAL, ArrayRecord)["shard"].data)


def pack(shard: Shard | Residual) -> ArrayRecord:
    """Return a shard or a residual as one array."""
    data = shard.to_bytes()
    return ArrayRecord({"shard": Array("uint8", (len(data),), STYPE, data)})


def unpack(record: ArrayRecord) -> Shard:
    """Return the shard of an array.

    Raises:
        UserError: the array is not a shard.
    """
    if list(record) != ["shard"]:
        raise UserError(f"arrays named {_names(record)!r}, where a shard is needed")
    return Shard.from_bytes(record["shard"].data)


def part_of(content: RecordDict, name: str, kind: type) -> Any:
    """Return a record of a node's message.

    Raises:
        UserError: the node reports a failure, or there is no such record of that kind.
    """
    if "failure" in content and name != "failure":
        raise FailureError(Kind.FAILED, one_line(part_of(content, "failure", ConfigRecord).get("why")))
    if not isinstance(content.get(name), kind):
        raise UserError(f"a message without {name!r}; it has {_names(content) or 'nothing'}")
    return content[name]


def content_of(reply: Message) -> RecordDict:
    """Return the content of a reply.

    Raises:
        UserError: the reply is an error.
    """
    if reply.has_error():
        kind = Kind.ABSENT if reply.error.code == ErrorCode.NODE_UNAVAILABLE else Kind.FAILED
        raise FailureError(kind, f"error {reply.error.code}: {one_line(reply.error.reason)}")
    return reply.content


def _names(record: RecordDict | ArrayRecord) -> str:
    return one_line(", ".join(map(str, record)))[:80]
