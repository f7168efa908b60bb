"""Send messages and fetch replies one by one, so that the server's memory does not grow with the number of nodes.

`Grid.send_and_receive` holds all messages and all replies of a round. Here a message is made, sent and forgotten before
the next one is made, and a reply is fetched when the one before it has been used. What waits is in Flower's SuperLink.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from time import monotonic, sleep
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Error, Message, RecordDict

from sharding.errors import UserError
from sharding.flower.messages import (
    ARRAYS,
    CONFIG,
    FROZEN,
    LACKS,
    LATE,
    UNREADABLE,
    UNSENT,
    content_of,
    pack,
    pull,
    settings,
)
from sharding.flower.nodes import Node, Nodes
from sharding.rounds.failures import Failure
from sharding.rounds.frozen import Frozen
from sharding.rounds.plan import Client, Plan

log = logging.getLogger("flwr.sharding")  # Flower shows the lines of "flwr"

Result = TypeVar("Result")

POLL = 0.5  # seconds between looks for replies
SLACK = 10.0  # seconds to send a message, or to fetch its reply


def lifetime(timeout: float, num_messages: int) -> float:
    """Return the seconds that each of a round's messages lives: the wait begins when all are sent.

    A message that lives longer is waste: a node that was late would still train for it.
    """
    return timeout + SLACK * (1 + num_messages)


class Exchange:
    """What a server sends to nodes and what they reply, one message at a time; Flower's grid in all else.

    There is one reply for each message, in the order of the messages; in place of a missing one, an error of the node.
    A reply counts only from the node that the message was sent to. The frozen part is sent to each node once. A node
    that replies that it lacks what it keeps is sent its message again with it, once, and has until the same end to
    reply.

    Args:
        nodes: the connected nodes; what they were asked when they connected, they keep.
        timeout: seconds to wait for replies once all messages are sent; None for no limit.
    """

    def __init__(self, nodes: Nodes, timeout: float | None) -> None:
        self._grid, self._question, self._timeout = nodes.grid, nodes.question, timeout
        self._nodes: dict[int, Node] = {}  # that are sent the present messages, by Flower's number
        self._records: Callable[[Node], dict[str, Any]]  # of a node's present message
        self._sent: dict[int, str] = {}  # by Flower's number, the digest of the frozen part that a node was sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def messages(
        self,
        kind: str,
        nodes: Iterable[Node],
        round: int,
        values: Callable[[Node], Mapping[str, Any]],
        plan: Plan | None = None,
        frozen: Frozen | None = None,
    ) -> Iterator[Message]:
        """Return an iterator that makes a message of a type of Flower's, in the group of a round, for each node.

        It has what `values` returns for the node and, with a plan, the node's shard and the frozen part that it needs.
        """

        def records(node: Node) -> dict[str, Any]:
            if plan is None:
                return {CONFIG: ConfigRecord(dict(values(node)))}
            content: dict[str, Any] = pack(plan.shard(node.client), values(node))
            if frozen and self._sent.get(node.id) != frozen.digest:
                content[CONFIG][FROZEN], self._sent[node.id] = frozen.to_bytes(), frozen.digest
            return content

        self._nodes, self._records = {node.id: node for node in nodes}, records
        ttl = None if self._timeout is None else lifetime(self._timeout, len(self._nodes))
        return (
            Message(RecordDict(records(node)), dst_node_id=id, message_type=kind, ttl=ttl, group_id=str(round))
            for id, node in self._nodes.items()
        )

    def answers(
        self, replies: Iterable[Message], read: Callable[[RecordDict], Result]
    ) -> Iterator[tuple[Client, Result | Failure]]:
        """Yield what `read` makes of each node's reply, or why it has none."""
        for reply in replies:
            node = self._nodes.get(reply.metadata.src_node_id)
            if node is None:
                log.warning("ignored an unrequested reply from node %d", reply.metadata.src_node_id)
                continue
            try:
                result: Result | Failure = read(content_of(reply))
            except Exception as error:  # whatever one node sends, the others go on
                result = Failure.of(error)
            del reply
            yield node.client, result
            del result

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send all messages, and return an iterator that fetches the reply to each when it is asked for it.

        Args:
            messages: the messages, made as they are sent.
            timeout: seconds to wait for replies once all messages are sent; None for no limit.
        """
        sent = []
        for message in messages:
            rest = {name: record for name, record in message.content.items() if name != ARRAYS}
            rest[CONFIG] = settings(message.content[CONFIG])
            sent.append((self._push(message), _with_content(message, rest)))
            del message  # with its shard
        return self._replies(sent, inf if timeout is None else timeout)

    def _push(self, message: Message) -> str | None:
        return next(iter(self._grid.push_messages([message])), None)

    def _replies(self, sent: list[tuple[str | None, Message]], seconds: float) -> Iterator[Message]:
        end = monotonic() + seconds
        for number, message in sent:
            node = message.metadata.dst_node_id
            reply = self._wait(number, node, end, seconds)
            if isinstance(reply, Error) and LACKS in str(reply.reason):  # None where the node gave none
                log.info("node %d is sent again what it keeps", node)
                self._sent.pop(node, None)
                content = {**self._question, **self._records(self._nodes[node])}
                content[CONFIG].update(message.content[CONFIG])
                number = self._push(_with_content(message, {**message.content, **content}))  # noqa: PLW2901
                reply = self._wait(number, node, end, seconds)
            # Errors of the SuperLink do not name the node.
            yield Message(reply, reply_to=message) if isinstance(reply, Error) else reply
            del reply

    def _wait(self, number: str | None, node: int, end: float, seconds: float) -> Message | Error:
        """Return a node's reply to a message, or why there is none by the end."""
        if number is None:
            return Error(UNSENT, "Flower did not accept the message to it, see the log")
        while True:
            try:
                replies = pull(self._grid, number)
            except UserError as error:
                return Error(UNREADABLE, str(error))
            for reply in replies:
                if reply.has_error():
                    return reply.error
                if reply.metadata.src_node_id == node:
                    return reply
                log.warning("ignored an unrequested reply from node %d", reply.metadata.src_node_id)
            if monotonic() > end:
                return Error(LATE, f"no reply within {seconds:g} s")
            sleep(POLL)


def _with_content(message: Message, records: Mapping[str, Any]) -> Message:
    """Return a message to the same node with these records. It lives as long as the other would have."""
    to = message.metadata
    return Message(
        RecordDict(dict(records)),
        dst_node_id=to.dst_node_id,
        message_type=to.message_type,
        ttl=to.ttl,
        group_id=to.group_id,
    )
