"""Nodes without processes: a grid that runs the nodes' own app at once."""

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from train.federate import client_app

Bend = Callable[[Message], Iterable[Message]]


class Nodes(Grid):
    """A grid of nodes that answer at once, each with its own configuration.

    Attributes:
        settings: of the nodes that are there, by number.
        bend: what becomes of a node's replies, by node; they travel as they are elsewhere.
        sent: all messages that the server has sent.
        keys: the public keys of nodes that have one.
    """

    def __init__(self, settings: Mapping[int, dict[str, Any]]) -> None:
        self.settings = dict(settings)
        self.bend: dict[int, Bend] = {}
        self.sent: list[Message] = []
        self.keys: dict[int, bytes] = {}
        self.states: dict[int, RecordDict] = {}  # what Flower holds for each node
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

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.get_node_ids()]

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
        context = Context(1, number, self.settings[number], self.states.setdefault(number, RecordDict()), {})
        server, TaskIdentity.node_id = TaskIdentity.node_id, number
        try:
            return client_app.app(message, context)
        except Exception as error:  # as Flower's own process does
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
        finally:
            TaskIdentity.node_id = server

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        replies = [reply for reply in self._replies if reply.metadata.reply_to_message_id in wanted]
        self._replies = [reply for reply in self._replies if reply.metadata.reply_to_message_id not in wanted]
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError
