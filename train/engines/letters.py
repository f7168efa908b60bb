"""Orders and parcels, and how they are written for other hosts: plain data in JSON and shards in wire form, no pickles.

A letter is 8 bytes that tell the length of its head, the head in JSON, and the shards one after the other.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharding.planner import Client
from train.engines.stacked import Bunch

Mail = bytes | Path  # a shard in its wire form, or where that lies; who opens it takes it away


@dataclass(frozen=True)
class Order:
    """What rank 0 asks of a worker: train these bunches, on these shards in wire form."""

    round: int
    lr: float
    bunches: Sequence[Bunch]
    terms: Mapping[Client, Mail]
    dense: Mail


@dataclass(frozen=True)
class Parcel:
    """A worker's updates of one bunch, or what stopped it."""

    updates: Sequence[tuple[Client, Mail | None, float | None, str | None]]
    error: str | None = None


Message = Order | Parcel | None  # None sends home


def write(message: Message) -> bytes:
    """Return the letter that says the message; shards must be bytes."""
    shards: list[Mail] = []
    head: dict[str, Any] = {}
    if isinstance(message, Order):
        shards = [*message.terms.values(), message.dense]
        bunches = [[bunch.ratio, bunch.clients, bunch.steps] for bunch in message.bunches]
        head = {"round": message.round, "lr": message.lr, "bunches": bunches, "clients": [*message.terms]}
    elif isinstance(message, Parcel):
        shards = [mail for _, mail, _, _ in message.updates if mail is not None]
        updates = [[client, mail is not None, loss, failure] for client, mail, loss, failure in message.updates]
        head = {"updates": updates, "error": message.error}
    parts = [mail for mail in shards if isinstance(mail, bytes)]
    assert len(parts) == len(shards), "a path means nothing to another host"
    text = json.dumps(head | {"sizes": [*map(len, parts)]}).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def read(letter: bytes) -> Message:
    """Return the message of a letter.

    Raises:
        ValueError, LookupError, TypeError, RecursionError: it is none.
    """
    end = 8 + int.from_bytes(letter[:8], "little")
    head = json.loads(letter[8:end])
    shards = deque(_cut(letter, end, head["sizes"]))
    if "updates" in head:
        updates = [
            (_client(client), shards.popleft() if has_shard else None, _number(loss), _text(failure))
            for client, has_shard, loss, failure in head["updates"]
        ]
        return Parcel(updates, _text(head["error"]))
    if "bunches" not in head:
        return None
    bunches = [
        Bunch(float(ratio), tuple(map(_client, clients)), int(steps)) for ratio, clients, steps in head["bunches"]
    ]
    terms: dict[Client, Mail] = {_client(client): shards.popleft() for client in head["clients"]}
    return Order(int(head["round"]), float(head["lr"]), bunches, terms, shards.popleft())


def _cut(letter: bytes, start: int, sizes: Sequence[int]) -> Iterator[bytes]:
    for size in sizes:
        yield letter[start : start + size]
        start += size


def _client(value: object) -> Client:
    if isinstance(value, int | str):
        return value
    raise ValueError(f"{value!r} is no client")


def _number(value: object) -> float | None:
    return None if value is None else float(str(value))


def _text(value: object) -> str | None:
    return None if value is None else str(value)
