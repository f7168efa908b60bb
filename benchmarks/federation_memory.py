"""Measure a federation's server in a round of 4 and of 32 clients: its peak memory does not grow with the cohort.

    python benchmarks/federation_memory.py [4 32] [--layers 6]

The model is a decoder of 77 million parameters with random weights, and every client has r = 0.1 (`top_n`, so that the
plan has the same terms for any number of clients). Flower's grid is replaced by one in this process that keeps neither
messages nor replies: it makes a reply when the server pulls it. So this is what the server's own code keeps, without
Flower's SuperLink. Each number of clients runs in a process of its own, with glibc's own allocator; memory is what the
exchange of the round takes beyond the model and its plan. Writes results/federation_memory.csv. Linux only.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from measure import forget_peak, in_new_process, resident, save_rows
from scale import KEEP_RATIO, gpt2, trained

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

from sharding import Frozen, Plan, Server, ShardPlanner
from sharding.flower.messages import METRICS, NODE, pack
from train.config.schema import check_config
from train.federate.nodes_engine import NodesEngine
from train.federate.roster import Roster, Timeouts
from train.federate.server_app import MAX_SHARE

Row = dict[str, int | float]


class LeanGrid(Grid):
    """A grid of nodes 1, 2, … that forgets each message and makes each reply when it is pulled.

    Attributes:
        plan: the plan of the round; client c is node c + 1.
    """

    plan: Plan

    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self._sent: dict[str, Message] = {}  # without their contents

    def set_run(self, run: Any) -> None:
        """Do nothing: there is no run."""

    @property
    def run(self) -> Any:
        """There is no run."""
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse what the server does not use."""
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse what the server does not use."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes."""
        return range(1, self._num_clients + 1)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes."""
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages, and forget their contents."""
        numbers = []
        for message in messages:
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            empty = Message(RecordDict(), dst_node_id=node, message_type=kind)
            numbers.append(str(len(self._sent)))
            empty.metadata.__dict__["_message_id"] = numbers[-1]
            self._sent[numbers[-1]] = empty
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Yield each reply as it is made."""
        for number in message_ids:
            yield self._reply(self._sent[number])

    def _reply(self, message: Message) -> Message:
        server, node = TaskIdentity.node_id, message.metadata.dst_node_id
        if message.metadata.message_type == "query":
            report = {"partition-id": node - 1, "keep-ratio": KEEP_RATIO, "num-examples": 100}
            content = RecordDict({NODE: ConfigRecord(report)})
        else:
            update = pack(trained(self.plan.shard(node - 1)))
            content = RecordDict({**update, METRICS: MetricRecord({"train_loss": 0.0})})
        TaskIdentity.node_id = node
        reply = Message(content, reply_to=message)
        TaskIdentity.node_id = server
        return reply


def serve(num_clients: int, layers: int) -> Row:
    """Run a round and return the server's peak memory."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    clients = {"count": num_clients, "per_round": num_clients}
    parts = {"model": {"name": "mlp"}, "data": {"name": "digits"}}  # which nodes would read
    config = check_config({"name": "memory", "rounds": 1, "keep_ratio": KEEP_RATIO, "clients": clients, **parts})
    grid = LeanGrid(num_clients)
    roster = Roster(grid, config, Timeouts(60, 60))
    while len(roster.connected()) < num_clients:
        pass
    server = Server(gpt2(layers, vocabulary=256), ShardPlanner("top_n"), max_share=MAX_SHARE)
    job: Any = SimpleNamespace(local=config.local, device="cpu", lr=lambda client, lr: lr, frozen=Frozen({}))
    engine = NodesEngine(roster, job)
    plan = grid.plan = server.plan(dict.fromkeys(range(num_clients), KEEP_RATIO), round=0)
    before = resident("VmRSS")
    forget_peak()
    average = server.average(plan)
    for client, reply in engine.train(plan, 0, 0.1):
        average.add(client, reply.update)
    peak = resident("VmHWM") - before
    assert len(server.step(average).accepted) == num_clients
    return {
        "clients": num_clients,
        "parameters": sum(part.numel() for part in server.model.parameters()),
        "shard_bytes": plan.shard(0).nbytes,
        "exchange_peak_bytes": peak,
        "exchange_peak_shards": round(peak / plan.shard(0).nbytes, 2),
    }


def measure(counts: Iterable[int], layers: int) -> list[Row]:
    """Measure each number of clients in a process of its own."""
    return [in_new_process(serve, count, layers) for count in counts]


def main() -> None:
    """Measure, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, default=[4, 32], help="numbers of clients")
    parser.add_argument("--layers", type=int, default=6, help="of the decoder, 12.6 million parameters each")
    parser.add_argument("--output", type=Path, default=Path("results/federation_memory.csv"))
    arguments = parser.parse_args()
    rows = measure(arguments.counts, arguments.layers)
    print(*rows, sep="\n")
    save_rows(arguments.output, rows)


if __name__ == "__main__":
    main()
