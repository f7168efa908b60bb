"""Nodes without processes: a grid that runs the nodes' own app at once."""

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

if "REQUIRE_FLOWER" not in os.environ:
    pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from train.config import Config, load_config
from train.federate import node

Bend = Callable[[Message], Iterable[Message]]


class Nodes(Grid):
    """A grid of nodes that answer at once, each with its own configuration.

    Attributes:
        settings: of the nodes that are there, by number.
        bend: what becomes of a node's replies, by node; they travel as they are elsewhere.
        sent: all messages that the server has sent.
    """

    def __init__(self, settings: Mapping[int, dict[str, Any]]) -> None:
        self.settings = dict(settings)
        self.bend: dict[int, Bend] = {}
        self.sent: list[Message] = []
        self._replies: list[Message] = []
        self._numbers = count()

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.settings)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            numbers.append(str(next(self._numbers)))
            message.metadata.__dict__["_message_id"] = numbers[-1]
            self.sent.append(message)
            number = message.metadata.dst_node_id
            if number in self.settings:
                reply = self._answer(number, message)
                self._replies += self.bend.get(number, lambda reply: [reply])(reply)
        self._replies.reverse()  # in no order that the server could count on
        return numbers

    def _answer(self, number: int, message: Message) -> Message:
        context = Context(1, number, self.settings[number], RecordDict(), {})
        server, TaskIdentity.node_id = TaskIdentity.node_id, number
        try:
            return node.app(message, context)
        except Exception as error:  # as Flower's own process does
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
        finally:
            TaskIdentity.node_id = server

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies, self._replies = self._replies, []
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the server of a run, as messages want to know."""
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Return a small configuration of four clients with unequal keep ratios, with overrides."""

    def make(*overrides: str) -> Config:
        path = tmp_path / "small.yaml"
        path.write_text(
            "{name: small, rounds: 2, engine: sequential, model: {name: mlp, hidden: [32, 16]}, data: {name: digits}, "
            "clients: {count: 4, per_round: 3}, keep_ratio: {0.25: 0.5, 0.5: 0.5}, local: {epochs: 1}}"
        )
        return load_config(path, [f"output={tmp_path / 'run'}", *overrides])

    return make
