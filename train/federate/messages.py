"""What travels between server and nodes: a shard's own wire form in one array, a few plain values, and no pickle.

Whoever reads a message does not trust it: bytes that are no shard, or values that are not there, are a `UserError`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Self

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode

from sharding import Shard
from sharding.errors import FailureError, Kind, UserError
from sharding.shard import update_norm
from train.config.schema import Config, check_config
from train.engines import Update

STYPE = "spectral-sharding.shard"  # says how an array's bytes are to be read; Flower itself does not look at them
UPLOAD = "train.upload"  # the kind of message that asks a node for the update it keeps
LONGEST = 500  # characters of a node's own words that are kept


@dataclass(frozen=True)
class Order:
    """What a node is to do in a round."""

    config: Config
    shard: Shard
    round: int
    lr: float

    def to_record(self) -> RecordDict:
        """Return the content of a message."""
        values = {"round": self.round, "lr": self.lr, "config": config_text(self.config)}
        return RecordDict({"shard": pack(self.shard), "values": ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict) -> Self:
        """Read the content of a message.

        Raises:
            UserError: it is not what `to_record` makes.
        """
        values = content["values"]
        return cls(read_config(values["config"]), unpack(content["shard"]), values["round"], values["lr"])


@dataclass(frozen=True)
class Card:
    """What a node says of itself.

    Attributes:
        partition: the client that it is, from 0.
        keep_ratio: r that it can afford.
        num_samples: D_c.
    """

    partition: int
    keep_ratio: float
    num_samples: int

    def to_record(self) -> RecordDict:
        """Return the content of a message."""
        return RecordDict({"card": ConfigRecord(dict(vars(self)))})

    @classmethod
    def from_record(cls, content: RecordDict) -> Self:
        """Read the content of a message, or a line of what the server keeps.

        Raises:
            UserError: it is not what `to_record` makes, or no client can be so.
        """
        return cls.of(part_of(content, "card", ConfigRecord))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the card with these values.

        Raises:
            UserError: no client can be so.
        """
        known: list[Any] = [values.get(key) for key in ("partition", "keep_ratio", "num_samples")]
        partition, ratio, size = known
        numbers = type(partition) is int and type(ratio) in (int, float) and type(size) is int  # a bool is none
        if not (numbers and partition >= 0 and 0 < ratio <= 1 and size >= 1):
            said = one_line(f"partition {partition!r}, keep ratio {ratio!r}, {size!r} samples")
            raise UserError(
                f"it says {said}; needed are a partition from 0, a keep ratio above 0 and at most 1, and a sample"
            )
        return cls(partition, float(ratio), size)


def reply_record(update: Update) -> RecordDict:
    """Return the content of a node's reply."""
    if update.shard is None:
        return RecordDict({"failure": ConfigRecord({"why": str(update.failure or "")})})
    loss = float("nan") if update.loss is None else float(update.loss)
    return RecordDict({"shard": pack(update.shard), "values": ConfigRecord({"loss": loss})})


def read_reply(content: RecordDict) -> Update:
    """Read a node's reply; whether it fits the round is not looked at.

    Raises:
        UserError: it is not what `reply_record` makes, or tells of a failure.
    """
    raise_failure(content)
    loss = part_of(content, "values", ConfigRecord).get("loss")
    if not isinstance(loss, float):
        raise UserError(f"its loss is {loss!r}, not a number")
    return Update(unpack(part_of(content, "shard", ArrayRecord)), torch.tensor(loss) if isfinite(loss) else None)


def config_text(config: Config) -> str:
    """Return what a node is told of the configuration: all but where the server writes."""
    return config.model_dump_json(exclude_defaults=True, exclude={"output", "tracking"})


def read_config(text: str) -> Config:
    """Return the configuration that a server has sent.

    Raises:
        UserError: it is none.
    """
    return check_config(json.loads(text))


def pack(shard: Shard) -> ArrayRecord:
    """Return a shard as one array."""
    data = shard.to_bytes()
    return ArrayRecord({"shard": Array("uint8", (len(data),), STYPE, data)})


def unpack(record: ArrayRecord) -> Shard:
    """Return the shard of an array.

    Raises:
        UserError: it is none.
    """
    if list(record) != ["shard"]:
        raise UserError(f"arrays named {one_line(', '.join(map(str, record)))[:80]!r}, where a shard is needed")
    return Shard.from_bytes(record["shard"].data)


def part_of(content: RecordDict, name: str, kind: type) -> Any:
    """Return a record of a message.

    Raises:
        UserError: there is none of that kind.
    """
    if not isinstance(content.get(name), kind):
        raise UserError(
            f"a message without {name!r}; it has {one_line(', '.join(map(str, content)))[:80] or 'nothing'}"
        )
    return content[name]


def content_of(reply: Message) -> RecordDict:
    """Return the content of a reply.

    Raises:
        UserError: it tells of an error.
    """
    if reply.has_error():
        kind = Kind.ABSENT if reply.error.code == ErrorCode.NODE_UNAVAILABLE else Kind.FAILED
        raise FailureError(kind, f"error {reply.error.code}: {one_line(reply.error.reason)}")
    return reply.content


def raise_failure(content: RecordDict) -> None:
    """Raise what a node says went wrong, if it says so."""
    if "failure" in content:
        raise FailureError(Kind.FAILED, one_line(part_of(content, "failure", ConfigRecord).get("why")))


def one_line(words: object) -> str:
    """Return what a node says as one line that a terminal can show: it may forge no line, nor steer the terminal."""
    line = " ".join(str(words)[: 2 * LONGEST].split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:LONGEST]


def norm_of(sent: Shard, returned: Shard, lr: float) -> float:
    """Return ‖U‖/lr, with the bits of `train.rounds.reported_norms`."""
    return float(torch.stack([update_norm(sent, returned)]) / lr)


def read_norm(content: RecordDict) -> float:
    """Read what a node reports that keeps its update: the norm ‖U‖/lr, which may not be finite.

    Raises:
        UserError: it is no norm, or the message tells of a failure.
    """
    raise_failure(content)
    norm = part_of(content, "report", ConfigRecord).get("norm")
    if norm is None:
        raise FailureError(Kind.CONTRADICTORY, "its report has no norm")
    if not isinstance(norm, float) or norm < 0:
        raise UserError(f"its norm is {one_line(repr(norm))}, not a number of at least 0")
    return norm


def request_upload(plan: str) -> RecordDict:
    """Return the content of a message that asks for the update of a round."""
    return RecordDict({"wanted": ConfigRecord({"plan": plan})})
