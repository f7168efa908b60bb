"""Send messages and fetch replies one by one, so that the server's memory does not grow with the number of nodes.

`Grid.send_and_receive` holds all messages and all replies of a round. Here a message is made, sent and forgotten before
the next one is made, and a reply is fetched when the one before it has been used. What waits is in Flower's SuperLink.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from time import monotonic, sleep
from typing import Any

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from sharding.errors import UserError
from sharding.flower.messages import ARRAYS, LACKS, LATE, RESIDUAL, UNREADABLE, UNSENT

log = logging.getLogger("flwr.sharding")  # Flower shows the lines of "flwr"

POLL = 0.5  # seconds between looks for replies
SLACK = 10.0  # seconds to send a message, or to fetch its reply


def lifetime(timeout: float, num_messages: int) -> float:
    """Return the seconds that each of a round's messages lives: the wait begins when all are sent.

    A message that lives longer is waste: a node that was late would still train for it.
    """
    return timeout + SLACK * (1 + num_messages)


class StreamingGrid:
    """A grid that sends and receives one message at a time, and is another grid otherwise.

    There is one reply for each message, in the order of the messages; in place of a missing one, an error of the node.
    A reply counts only from the node that the message was sent to. A node that lacks what it keeps is sent its message
    again with it, once, and has until the same end to reply.

    Args:
        grid: that sends and receives.
        again: takes Flower's number of a node, and returns the records of its message and those that it keeps.
    """

    def __init__(self, grid: Grid, again: Callable[[int], Mapping[str, Any]]) -> None:
        self._grid, self._again = grid, again

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
            rest = {name: record for name, record in message.content.items() if name not in (ARRAYS, RESIDUAL)}
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
            if isinstance(reply, Error) and LACKS in reply.reason:
                log.info("node %d is sent again what it keeps", node)
                number = self._push(_with_content(message, {**self._again(node), **message.content}))  # noqa: PLW2901
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
