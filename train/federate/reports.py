"""An update that stays with its node until somebody wants to hear it, for the samplers that choose after training.

First a node trains, keeps its update, and reports. With `ocs` and `ocs_partial` it reports its norm, and the server
asks those for their updates that it has drawn. With `aocs` the norm stays with the node: the server sends totals over
all nodes, each in answer to two numbers of every node, until each can tell its own probability (`aocs_part`), and flips
its own coin. Flower has no secure sum of such numbers: here the server adds them up in the clear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from sharding.clients import SAMPLERS
from sharding.clients.aocs import Totals, aocs_part
from sharding.clients.base import upload_coins
from sharding.clients.optimal import SecureOptimalSampler
from sharding.errors import UserError, pick
from sharding.shard import Shard, update_norm
from train.config import Config
from train.engines import Update
from train.federate.messages import Order, part_of, raise_failure, read_reply, reply_record

Vector = NDArray[np.float64]

TOTALS, DRAW, UPLOAD = "train.totals", "train.draw", "train.upload"  # kinds of messages


def holds_back(config: Config) -> bool:
    """Return whether only some of those who train send their update."""
    return pick(SAMPLERS, config.clients.sampler, "sampler").has_budget


def reported_norm(sent: Shard, returned: Shard, lr: float) -> float:
    """Return ‖U‖/lr, with the bits of `train.rounds.reported_norms`."""
    return float(torch.stack([update_norm(sent, returned)]) / lr)


@dataclass(frozen=True)
class Report:
    """What a node says of an update that it keeps.

    Attributes:
        norm: ‖U‖/lr; None where it is finite, and for totals only.
    """

    norm: float | None

    def to_record(self) -> RecordDict:
        """Return the content of a message."""
        return RecordDict({"report": ConfigRecord({} if self.norm is None else {"norm": self.norm})})

    @classmethod
    def from_record(cls, content: RecordDict) -> Self:
        """Read the content of a message.

        Raises:
            UserError: it is not what `to_record` makes, or tells of a failure.
        """
        raise_failure(content)
        norm = part_of(content, "report", ConfigRecord).get("norm")
        if not (norm is None or (isinstance(norm, float) and not norm < 0)):
            raise UserError(f"its norm is {norm!r}, not a number of at least 0")
        return cls(norm)


@dataclass(frozen=True)
class Ballot:
    """What a node is told so that it finds out by itself whether it uploads.

    Attributes:
        plan: of the round.
        share: w_c = D_c/ΣD.
        budget: m.
        num_clients: n, who reported.
        totals: of each exchange so far; None where all upload with the same probability.
    """

    plan: str
    share: float
    budget: float
    num_clients: int
    totals: Sequence[Totals] | None

    def part(self, *norms: float) -> Vector | tuple[Vector, Vector]:
        """Return p of clients with this share and these norms, or their two numbers for the next totals."""
        if self.totals is None:
            return np.full(len(norms), min(1.0, self.budget / self.num_clients))
        return aocs_part(self.share * np.array(norms), self.budget, self.num_clients, self.totals)

    def to_record(self) -> RecordDict:
        """Return the content of a message."""
        values = {key: value for key, value in vars(self).items() if key != "totals"}
        if self.totals is not None:
            values["totals"] = [number for pair in self.totals for number in pair]
        return RecordDict({"ballot": ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict) -> Self:
        """Read the content of a message."""
        values = dict(content["ballot"])
        flat = values.pop("totals", None)
        return cls(**values, totals=None if flat is None else list(zip(flat[::2], flat[1::2], strict=True)))


def keep(state: RecordDict, order: Order, update: Update, client: int) -> RecordDict:
    """Keep an update in what Flower holds for this node, in place of an earlier one; return the report."""
    config = order.config
    assert update.shard is not None
    norm = reported_norm(order.shard, update.shard, order.lr)
    coin = upload_coins(config.seed, order.round, config.clients.count)[client]
    for name, record in reply_record(update).items():
        state[name] = record
    state["held"] = ConfigRecord({"plan": order.shard.plan, "norm": norm, "coin": float(coin)})
    hidden = issubclass(SAMPLERS[config.clients.sampler], SecureOptimalSampler) and np.isfinite(norm)
    return Report(None if hidden else norm).to_record()


def give(state: RecordDict, plan: str) -> RecordDict:
    """Return the update that is kept, as `reply_record` makes it.

    Raises:
        UserError: it is not here.
    """
    _held(state, plan)
    return RecordDict({"shard": state["shard"], "values": state["values"]})


def summands(state: RecordDict, ballot: Ballot) -> RecordDict:
    """Return this node's two numbers for the next totals.

    Raises:
        UserError: its update is not here.
    """
    norm, _ = _held(state, ballot.plan)
    part = ballot.part(norm)
    assert isinstance(part, tuple)
    return _numbers([float(number[0]) for number in part])


def draw(state: RecordDict, ballot: Ballot) -> RecordDict:
    """Return the update if the coin falls so, and in any case what the metrics sum up: p, u² and u²(1/p − 1).

    Raises:
        UserError: its update is not here.
    """
    norm, coin = _held(state, ballot.plan)
    part = ballot.part(norm)
    assert not isinstance(part, tuple)
    p, square = float(part[0]), (ballot.share * norm) * (ballot.share * norm)
    told = _numbers([p, square, square * ((1.0 - p) / p) if p > 0 else 0.0])
    if coin < p:
        told.update(give(state, ballot.plan))
    return told


def wanted(plan: str) -> RecordDict:
    """Return the content of a message that asks for the update of a round."""
    return RecordDict({"wanted": ConfigRecord({"plan": plan})})


def read_summands(content: RecordDict) -> list[float]:
    """Read a node's two numbers for the next totals.

    Raises:
        UserError: they are none, or it tells of a failure.
    """
    numbers = _read_numbers(content, 2)
    if numbers[0] not in (0.0, 1.0):
        raise UserError(f"its numbers are {numbers}; the first is 0 or 1")
    return numbers


@dataclass(frozen=True)
class Draw:
    """What a node answers once its probability is settled.

    Attributes:
        sums: p, u² and u²(1/p − 1).
        update: None where the coin fell otherwise.
    """

    sums: list[float]
    update: Update | None


def read_draw(content: RecordDict) -> Draw:
    """Read a node's draw.

    Raises:
        UserError: it is none, or it tells of a failure.
    """
    return Draw(_read_numbers(content, 3), read_reply(content) if "shard" in content else None)


def _read_numbers(content: RecordDict, count: int) -> list[float]:
    raise_failure(content)
    numbers = part_of(content, "numbers", ConfigRecord).get("numbers")
    fine = isinstance(numbers, list) and len(numbers) == count
    if not (fine and all(isinstance(number, float) and 0 <= number < inf for number in numbers)):
        raise UserError(f"its numbers are {str(numbers)[:80]}; {count} of at least 0 are needed")
    return list(numbers)


def _numbers(numbers: list[float]) -> RecordDict:
    return RecordDict({"numbers": ConfigRecord({"numbers": numbers})})


def _held(state: RecordDict, plan: str) -> tuple[float, float]:
    """Return the norm and the coin of the update that is kept.

    Raises:
        UserError: it is not here.
    """
    held = state.get("held", {})
    if held.get("plan") != plan:
        raise UserError("it has no update of this round any more: it was started anew after training")
    return held["norm"], held["coin"]
