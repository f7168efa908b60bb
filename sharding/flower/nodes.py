"""The nodes that are connected, as clients with a keep ratio.

Flower gives a node another random number at each start, unless its key is registered. A node that reports its
``partition-id`` is the client of this number, so that its draws repeat; else the node's number is the client.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import monotonic, sleep

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from sharding.errors import UserError, safe_repr
from sharding.flower.messages import NODE, UNREACHABLE, content_of, part_of, pull
from sharding.rounds.failures import Failure

log = logging.getLogger("flwr.sharding")  # Flower shows the lines of "flwr"

KeepRatio = float | Callable[[int], float]

POLL = 1.0  # seconds between looks for nodes
PATIENCE = 60.0  # seconds that a round waits for a new node's report, and until a node that was left out is asked again
LIFETIME = 600.0  # seconds that a question waits for its answer; then the node is asked again


@dataclass(frozen=True)
class Node:
    """A connected node.

    Attributes:
        id: Flower's number.
        client: the client's number in the plan.
        keep_ratio: r.
    """

    id: int
    client: int
    keep_ratio: float


class Nodes:
    """The nodes that have connected.

    Args:
        grid: the grid of the server's app.
        keep_ratio: r of all nodes, or a function of Flower's number of a node; by default each new node is asked.
        question: the content of the message that asks a new node.
    """

    def __init__(self, grid: Grid, keep_ratio: KeepRatio | None = None, question: RecordDict | None = None) -> None:
        self.grid, self.question, self._keep_ratio = grid, question or RecordDict(), keep_ratio
        self._known: dict[int, Node] = {}  # by Flower's number
        self._next: dict[int, float] = {}  # by Flower's number, when a node that is not known is asked again
        self._asked: dict[str, tuple[int, float]] = {}  # by message: the node, and until when a round waits for it

    @property
    def waits(self) -> bool:
        """Whether a node has been asked so recently that it should answer soon."""
        return any(end > monotonic() for _, end in self._asked.values())

    def wait(self, enough: Callable[[dict[int, Node]], bool], timeout: float = inf) -> dict[int, Node]:
        """Return the connected nodes by client, once there are enough and new ones have reported.

        Args:
            enough: takes the nodes.
            timeout: seconds after which those that are connected are returned in any case.
        """
        begin = last = monotonic()  # when there were too few
        while True:
            nodes = self.connected()
            done, now = enough(nodes), monotonic()
            last = last if done else now
            if (done and not (self.waits and now < last + PATIENCE)) or now > begin + timeout:
                return nodes
            sleep(POLL)

    def connected(self) -> dict[int, Node]:
        """Return the connected nodes by client. Others are asked, and count once they have answered."""
        present = set(self.grid.get_node_ids())
        self._known = {id: node for id, node in self._known.items() if id in present}
        self._next = {id: time for id, time in self._next.items() if id in present}
        self._asked = {number: (id, end) for number, (id, end) in self._asked.items() if id in present}
        for id in sorted(present - self._known.keys()):
            if self._keep_ratio is not None:
                ratio = self._keep_ratio(id) if callable(self._keep_ratio) else self._keep_ratio
                self._known[id] = Node(id, id, ratio)
            elif (now := monotonic()) >= self._next.get(id, now):
                end = now if id in self._next else now + PATIENCE  # no round waits for a second answer
                self._next[id] = now + LIFETIME
                message = Message(self.question, dst_node_id=id, message_type=MessageType.QUERY, ttl=LIFETIME)
                self._asked |= dict.fromkeys(self.grid.push_messages([message]), (id, end))
        for number, (id, _) in list(self._asked.items()):
            try:
                reply = next(iter(pull(self.grid, number)), None)
                if reply is None:
                    continue
                self._known[id] = self.admit(id, part_of(content_of(reply), NODE, ConfigRecord))
            except UNREACHABLE:
                raise
            except Exception as error:  # whatever one node sends, the others go on
                self._next[id] = monotonic() + PATIENCE
                log.warning("node %d is left out: %s", id, Failure.of(error))
            del self._asked[number]
        # Two nodes may report the same partition: the first one is the client, as long as it is connected.
        return {node.client: node for node in reversed(self._known.values())}

    def admit(self, id: int, values: ConfigRecord) -> Node:
        """Return the client that a new node is, from its report; raise a UserError if the node is left out."""
        new = read_node(id, values)
        for node in self._known.values():
            if node.client == new.client:
                log.warning("node %d waits: its partition-id is %d, as that of node %d", id, new.client, node.id)
        return new


def read_node(id: int, values: ConfigRecord) -> Node:
    """Read a node's report, as `query_message` makes it; raise a UserError if a value is invalid."""
    client, ratio = values.get("partition-id", id), values.get("keep-ratio")
    if type(client) is not int or type(ratio) not in (int, float) or not 0 < ratio <= 1:
        raise UserError(f"it reports partition-id={safe_repr(client)} and keep-ratio={safe_repr(ratio)}")
    return Node(id, client, float(ratio))
