"""The nodes that are connected to the server, and their clients.

Nodes come and go. Each client's first report is kept in the run's directory and holds for the whole run, so that
samplers draw the same after a restart. A client belongs to the first node that claims it. That node's key is kept as
well, so that the client stays with it when the server restarts. Nodes without a registered key get a new key at each
start: if no key of the run is connected, the first node to claim a client gets it.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from time import monotonic
from typing import NamedTuple

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from sharding.errors import UserError, join_first
from sharding.flower.nodes import Node, Nodes, read_node
from sharding.rounds.plan import Client
from train.config.schema import Config
from train.federate.messages import NUM_SAMPLES, question_of
from train.rundir.file_names import CLIENTS_FILE

log = logging.getLogger(__name__)

REMIND = 30.0  # seconds between lines that name the missing clients


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds.

    Attributes:
        start: the wait for all clients to connect before the first round.
        round: the wait for a round's replies, once its shards are sent, and for a node to send to if there is none.

    Raises:
        UserError: one of them is not finite and above 0.
    """

    start: float
    round: float

    def __post_init__(self) -> None:
        for name, seconds in (("start", self.start), ("round", self.round)):
            if not 0 < seconds < inf:
                raise UserError(f"{name}-timeout is {seconds:g}; allowed are seconds above 0, e.g. 300")


class Report(NamedTuple):
    """What a client first reported: the keep ratio r that it can afford, and its number of samples D_c."""

    keep_ratio: float
    num_samples: int


class Roster(Nodes):
    """The nodes of a run, whose clients keep their first report and their first key.

    Args:
        grid: the grid of the server's app.
        config: the configuration of the run, which new nodes are sent.
        timeouts: the timeouts of the waits for nodes.
        reports: the reports of the run that is resumed, by client.
        keys: the digest of each node's public key in the run that is resumed, by client.

    Attributes:
        reports: the first report of each client, which holds for the whole run.
    """

    def __init__(
        self,
        grid: Grid,
        config: Config,
        timeouts: Timeouts,
        reports: Mapping[int, Report] | None = None,
        keys: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(grid, question=question_of(config))
        self.config, self.timeouts = config, timeouts
        self.reports, self._keys = dict(reports or {}), dict(keys or {})
        self._digests: dict[int, str] = {}  # by node, of the keys of all that have connected
        self._owners: dict[int, int] = {}  # the node of each client, connected or not

    def gather(self) -> None:
        """Wait until every client is connected. A resumed run starts without those that do not connect in time.

        Raise a UserError if clients that the run has never seen did not connect in time.
        """
        count, reminded = self.config.clients.count, -inf

        def complete(present: Mapping[int, Node]) -> bool:
            nonlocal reminded
            absent = [client for client in range(count) if client not in present]
            if absent and monotonic() >= reminded + REMIND:
                log.info("%d of %d clients connected, waiting for %s", len(present), count, join_first(absent, 5))
                reminded = monotonic()
            return not absent

        absent = {*range(count)} - self.wait(complete, self.timeouts.start).keys()
        if not absent:
            return
        names = join_first(sorted(absent), 5)
        if not self.reports.keys() >= absent:
            raise UserError(
                f"clients {names} are missing after {self.timeouts.start:g} s; start nodes with these numbers as "
                f"partition-id, or lower clients.count from {count} to the number of nodes"
            )
        log.warning("clients %s are missing after %g s; training starts without them", names, self.timeouts.start)

    def connected(self) -> dict[int, Node]:
        """Return the node of each client that is connected now."""
        self._digests |= {node.node_id: digest(node.public_key) for node in self.grid.get_nodes() if node.public_key}
        return super().connected()

    def reach(self, clients: Collection[Client]) -> dict[Client, Node]:
        """Return the nodes of the connected ones of these clients, in their order.

        Wait for one, at most as long as for a round, and for the reports of nodes that have just connected.
        """
        if not clients:
            return {}
        nodes = self.wait(lambda nodes: any(int(client) in nodes for client in clients), self.timeouts.round)
        return {client: nodes[int(client)] for client in clients if int(client) in nodes}

    def admit(self, id: int, values: ConfigRecord) -> Node:
        """Return the client that a new node is, from its report.

        Raise a UserError if the report is invalid or differs from the client's first, or another node is this client.
        """
        node, size = read_node(id, values), values.get(NUM_SAMPLES)
        if type(size) is not int or not 0 < size < 2**53:
            raise UserError(f"it reports {NUM_SAMPLES}={size!r}; a number of at least 1 is needed")
        if not 0 <= node.client < self.config.clients.count:
            raise UserError(f"its partition-id is {node.client}, but clients.count is {self.config.clients.count}")
        report = Report(node.keep_ratio, size)
        if self.reports.setdefault(node.client, report) != report:
            raise UserError(f"it reports {report}, but this run began with {self.reports[node.client]}")
        self._settle_owner(id, node.client)
        log.info("node %d is client %d: %d samples, r = %g", id, node.client, size, node.keep_ratio)
        return node

    def _settle_owner(self, node: int, client: int) -> None:
        """Assign a client to a node that claims it, or raise a UserError if it belongs to another node."""
        owner, key = self._owners.get(client, node), self._keys.get(client)
        if key and key == self._digests.get(node):
            if owner != node:
                log.warning("node %d is left out: client %d belongs to node %d, which has its key", owner, client, node)
                self._known.pop(owner, None)
        elif key and not set(self._keys.values()).isdisjoint(self._digests.values()):
            raise UserError(
                f"it claims client {client}, which belongs to another key in this run; start it with the key "
                f"that client {client} had, or delete node_keys from {CLIENTS_FILE}"
            )
        elif owner != node:
            raise UserError(f"it claims client {client}, which belongs to node {owner} for the whole run")
        self._owners[client] = node

    def node_keys(self) -> list[str]:
        """Return, by client, a digest of the first key of its node; an empty list if no node has a key."""
        keys = {client: self._digests[node] for client, node in self._owners.items() if node in self._digests}
        keys |= self._keys
        return [keys.get(client, "") for client in range(self.config.clients.count)] if keys else []


def digest(public_key: bytes) -> str:
    """Return a digest of a key, for a file that others may read."""
    return sha256(public_key).hexdigest()[:32]
