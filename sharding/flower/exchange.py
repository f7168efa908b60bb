"""Send messages and fetch replies one by one, so that the server's memory does not grow with the number of nodes.

`Grid.send_and_receive` holds all messages and all replies of a round. Here a message is made, sent and forgotten before
the next one is made, and a reply is fetched when the one before it has been used. What waits is in Flower's SuperLink.
"""

import logging
from collections.abc import Iterable, Iterator
from math import inf
from time import monotonic, sleep
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from sharding.flower.messages import LATE, UNSENT

log = logging.getLogger("flwr.sharding")  # Flower shows the lines of "flwr"

POLL = 0.5  # seconds between looks for replies
SLACK = 10.0  # seconds that a message outlives the wait for its reply, so that the server decides when time is up


class StreamingGrid:
    """A grid that sends and receives one message at a time, and is another grid otherwise.

    There is one reply for each message, in the order of the messages; in place of a missing one, an error of the node.
    A reply counts only from the node that the message was sent to.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send all messages, and return an iterator that fetches the reply to each when it is asked for it.

        Args:
            messages: made as they are sent.
            timeout: seconds to wait for replies once all messages are sent; None for no limit.
        """
        sent = []
        for message in messages:
            number = next(iter(self._grid.push_messages([message])), None)
            sent.append((number, message.metadata.dst_node_id, message.metadata.message_type))
            del message  # with its shard
        return self._replies(sent, inf if timeout is None else timeout)

    def _replies(self, sent: list[tuple[str | None, int, str]], seconds: float) -> Iterator[Message]:
        end = monotonic() + seconds
        for number, node, kind in sent:
            reply = None if number is None else self._wait(number, node, end)
            if reply is not None and not reply.has_error():
                yield reply
            else:
                error = Error(UNSENT, "Flower did not accept the message to it, see the log")
                if number is not None:
                    error = Error(LATE, f"no reply within {seconds:g} s") if reply is None else reply.error
                # Errors of the SuperLink do not name the node.
                yield Message(error, reply_to=Message(RecordDict(), dst_node_id=node, message_type=kind))
            del reply

    def _wait(self, number: str, node: int, end: float) -> Message | None:
        """Return a node's reply to a message, or None if there is none by the end."""
        while True:
            for reply in self._grid.pull_messages([number]):
                if reply.has_error() or reply.metadata.src_node_id == node:
                    return reply
                log.warning("ignored an unrequested reply from node %d", reply.metadata.src_node_id)
            if monotonic() > end:
                return None
            sleep(POLL)
