"""The server's memory does not grow with the cohort: messages and replies are handled one by one."""

import importlib
from pathlib import Path
from weakref import WeakSet

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from train.federate.roster import ask

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class LeanGrid:
    """A grid that forgets messages and makes a reply when it is pulled; counts what the server keeps of both."""

    def __init__(self):
        self.alive, self.most = WeakSet(), 0

    def _count(self, content):
        self.alive.add(content)
        self.most = max(self.most, len(self.alive))

    def push_messages(self, messages):
        (message,) = messages
        self._count(message)
        return [str(message.metadata.dst_node_id)]

    def pull_messages(self, numbers):
        (number,) = numbers
        request = Message(RecordDict(), dst_node_id=int(number), message_type=MessageType.TRAIN)
        reply = Message(RecordDict({"values": ConfigRecord({"node": int(number)})}), reply_to=request)
        reply.metadata.__dict__["_src_node_id"] = int(number)
        self._count(reply)
        return [reply]


@pytest.mark.usefixtures("flower_identity", "no_waiting")
@pytest.mark.parametrize("count", [4, 32])
def test_ask_with_any_number_of_clients_keeps_two_messages_at_most(count):
    grid = LeanGrid()
    messages = (
        (client, Message(RecordDict(), dst_node_id=client + 1, message_type=MessageType.TRAIN))
        for client in range(count)
    )
    replies = [(client, reply.content["values"]["node"]) for client, reply in ask(grid, messages, 1.0)]
    assert replies == [(client, client + 1) for client in range(count)]
    assert grid.most <= 2  # the reply at hand, and the one before it


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_server_peak_memory_of_32_clients_exceeds_that_of_4_by_less_than_two_shards(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(BENCHMARKS)
    few, many = importlib.import_module("federation_memory").measure([4, 32], layers=6)
    assert many["exchange_peak_bytes"] - few["exchange_peak_bytes"] < 2 * many["shard_bytes"]
