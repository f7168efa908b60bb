"""The nodes that are connected to the server, and their clients.

Nodes come and go. Each client's first introduction is kept in the run's directory and holds for the whole run, so that
samplers draw the same after a restart. A client belongs to the first node that claims it. That node's key is kept as
well, so that the client stays with it when the server restarts. Nodes without a registered key get a new key at each
start: if no key of the run is connected, the first node to claim a client gets it.
"""

import logging
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from time import monotonic, sleep

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from sharding.errors import UserError, few
from sharding.failures import one_line
from sharding.plan import Client
from train.config.schema import Config
from train.federate.messages import NodeInfo, config_text
from train.federate.status import Status
from train.rundir.file_names import CLIENTS_FILE

log = logging.getLogger(__name__)

POLL = 0.5  # seconds between looks for replies
REMIND = 30.0  # seconds between lines that name the missing clients
SLACK = 10.0  # seconds that a message outlives the wait for its reply, so that the server decides when time is up


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds.

    Attributes:
        start: for all clients to connect before the first round.
        round: for the replies of a round, once its shards are sent, and for a node to send them to if there is none.

    Raises:
        UserError: one of them is not finite and above 0.
    """

    start: float
    round: float

    def __post_init__(self) -> None:
        for name, seconds in (("start", self.start), ("round", self.round)):
            if not 0 < seconds < inf:
                raise UserError(f"{name}-timeout is {seconds:g}; allowed are seconds above 0, e.g. 300")


def ask(
    grid: Grid, messages: Iterable[tuple[Client, Message | None]], seconds: float
) -> Iterator[tuple[Client, Message | None]]:
    """Send each message as it is made, then yield each reply, in the order of the messages.

    A reply counts once, and only from the node that the message was sent to. Where there is no message to send, or no
    reply within the seconds after the last message, None takes its place.
    """
    sent: dict[Client, tuple[str, int] | None] = {}
    for client, message in messages:
        number = None if message is None else next(iter(grid.push_messages([message])), None)
        sent[client] = (number, message.metadata.dst_node_id) if message is not None and number else None
        del message  # with its shard
    end = monotonic() + seconds
    for client, ticket in sent.items():
        reply = None
        while ticket is not None and reply is None:
            for candidate in grid.pull_messages([ticket[0]]):
                if candidate.has_error() or candidate.metadata.src_node_id == ticket[1]:
                    reply = reply or candidate
                else:
                    log.warning("ignored an unrequested reply from node %d", candidate.metadata.src_node_id)
            if reply is None:
                if monotonic() > end:
                    break
                sleep(POLL)
        yield client, reply


@dataclass
class Nodes:
    """The nodes that have connected, and their clients.

    Attributes:
        roster: by client, its first introduction, which holds for the whole run.
        keys: by client, the digest of its node's public key in a run that is resumed.
    """

    grid: Grid
    config: Config
    timeouts: Timeouts
    roster: dict[int, NodeInfo] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    _digests: dict[int, str] = field(default_factory=dict)  # by node, of the keys of all that have connected
    _clients: dict[int, int | None] = field(default_factory=dict)  # by node; None for a node that is left out
    _owners: dict[int, int] = field(default_factory=dict)  # the node of each client, connected or not
    _asked: dict[str, int] = field(default_factory=dict)  # by message, the nodes that have yet to introduce themselves

    def gather(self) -> None:
        """Wait until every client is connected.

        A resumed run knows its clients, and starts without those that do not connect in time.

        Raises:
            UserError: clients that the run has never seen did not connect in time.
        """
        count, begin, reminded = self.config.clients.count, monotonic(), -inf
        while True:
            present = self.online()
            absent = [client for client in range(count) if client not in present]
            Status(self.config).set(joined=sorted(present), waiting_for=absent)
            if not absent:
                return
            names, waited = few(absent, 5), monotonic() - begin
            if waited > self.timeouts.start:
                break
            if waited - reminded >= REMIND:
                log.info("%d of %d clients connected, waiting for %s", len(present), count, names)
                reminded = waited
            sleep(POLL)
        if not self.roster.keys() >= {*absent}:
            raise UserError(
                f"clients {names} are missing after {self.timeouts.start:g} s; start nodes with these numbers as "
                f"partition-id, or lower clients.count from {count} to the number of nodes"
            )
        log.warning("clients %s are missing after %g s; training starts without them", names, self.timeouts.start)

    def online(self) -> dict[int, int]:
        """Return the node of each client that is connected now.

        New nodes are asked to introduce themselves, and count from the first call after they have answered.
        """
        nodes = list(self.grid.get_nodes())
        self._digests |= {node.node_id: digest(node.public_key) for node in nodes if node.public_key}
        present = {node.node_id for node in nodes}
        # A node that was left out and has gone is asked again when it returns.
        self._clients = {node: its for node, its in self._clients.items() if its is not None or node in present}
        self._ask_who(sorted(present - self._clients.keys() - set(self._asked.values())))
        for reply in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                self._introduce(node, reply)
        there = {node: client for node, client in self._clients.items() if client is not None and node in present}
        return {client: node for node, client in there.items()}

    def reach(self, clients: Set[int]) -> dict[int, int]:
        """Return the nodes of the connected ones of these clients; wait for one, at most as long as for a round."""
        end = monotonic() + self.timeouts.round
        while True:
            found = {client: node for client, node in self.online().items() if client in clients}
            if found or not clients or monotonic() > end:
                return found
            sleep(POLL)

    def _ask_who(self, nodes: list[int]) -> None:
        values = ConfigRecord({"config": config_text(self.config)})
        messages = [
            Message(RecordDict({"values": values}), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes
        ]
        numbers = self.grid.push_messages(messages) if messages else []
        self._asked |= {number: node for number, node in zip(numbers, nodes, strict=False) if number}

    def _introduce(self, node: int, reply: Message) -> None:
        try:
            if reply.has_error():
                raise UserError(one_line(reply.error.reason))
            info = NodeInfo.from_record(reply.content)
            self._clients[node] = self._admit(node, info)
            size, ratio = info.num_samples, info.keep_ratio
            log.info("node %d is client %d: %d samples, r = %g", node, info.partition, size, ratio)
        except UserError as why:
            self._clients[node] = None
            log.warning("node %d is left out: %s", node, why)

    def _admit(self, node: int, info: NodeInfo) -> int:
        if info.partition >= self.config.clients.count:
            raise UserError(f"its partition is {info.partition}, but clients.count is {self.config.clients.count}")
        if self.roster.setdefault(info.partition, info) != info:
            raise UserError(f"it reports {info}, but this run began with {self.roster[info.partition]}")
        self._settle_owner(node, info.partition)
        return info.partition

    def _settle_owner(self, node: int, client: int) -> None:
        """Assign a client to a node that claims it.

        Raises:
            UserError: it belongs to another node.
        """
        owner, key = self._owners.get(client, node), self.keys.get(client)
        if key and key == self._digests.get(node):
            if owner != node:
                log.warning("node %d is left out: client %d belongs to node %d, which has its key", owner, client, node)
                self._clients[owner] = None
        elif key and not set(self.keys.values()).isdisjoint(self._digests.values()):
            raise UserError(
                f"it claims client {client}, which belongs to another key in this run; start it with the key "
                f"that client {client} had, or delete node_keys from {CLIENTS_FILE}"
            )
        elif owner != node:
            raise UserError(f"it claims client {client}, which belongs to node {owner} for the whole run")
        self._owners[client] = node

    def node_keys(self) -> list[str]:
        """Return, by client, a digest of the first key of its node; an empty list if no node has a key."""
        own = {client: self._digests[node] for client, node in self._owners.items() if node in self._digests}
        keys = own | dict(self.keys)
        return [keys.get(client, "") for client in range(self.config.clients.count)] if keys else []


def digest(public_key: bytes) -> str:
    """Return a digest of a key, for a file that others may read."""
    return sha256(public_key).hexdigest()[:32]
