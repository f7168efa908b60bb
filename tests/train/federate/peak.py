"""A node in a process of its own: trains the shards in the files it is given, and prints its peak memory after each."""

import re
import sys
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from sharding import Shard
from sharding.flower.messages import pack
from train.federate import client_app
from train.federate.messages import digest_of


def main(data: str, *orders: str) -> None:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    context = Context(1, 1, {"partition-id": 0, "data": data}, RecordDict(), {})
    for config, shard in zip(orders[::2], orders[1::2], strict=True):
        values = {"round": 0, "lr": 0.1, "digest": digest_of(config)}
        shard = Shard.from_bytes(Path(shard).read_bytes())
        content = RecordDict({"run": ConfigRecord({"configuration": config}), **pack(shard, values)})
        del shard
        message = Message(content, dst_node_id=1, message_type=MessageType.TRAIN)
        del content
        assert "arrays" in client_app.app(message, context).content
        print(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
