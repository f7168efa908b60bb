"""A node's app with faults, by what its configuration says of it; the tests pack it with the sources and run it."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from math import inf, nan

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from train.engines import Update
from train.federate import client_app
from train.federate.messages import read_reply, reply_record

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    return client_app.app(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    fault = str(context.node_config.get("fault", ""))
    if fault == "dies in training":
        end_this_node()
    reply = client_app.app(message, context)
    if fault == "dies after training":
        end_this_node()
    if fault == "is late":
        time.sleep(600)  # longer than any round waits
    if fault in CHANGES:
        update = read_reply(reply.content)
        reply = Message(reply_record(Update(CHANGES[fault](update.shard), update.loss)), reply_to=message)
    return reply


def scaled(shard, factor):
    return shard.returned({name: value * factor for name, value in shard.trained().items()})


CHANGES = {
    "NaN": lambda shard: scaled(shard, nan),
    "Inf": lambda shard: scaled(shard, inf),
    "too long": lambda shard: scaled(shard, 1e6),
    "another shape": lambda shard: replace(
        shard, dense={name: value[..., :-1].clone() for name, value in shard.dense.items()}
    ),
    "a stale round": lambda shard: replace(shard, plan="0-" + "0" * 16),
}


def end_this_node() -> None:
    """End the SuperNode, its helper and this process, as a machine that loses its power."""
    helper = os.getppid()
    shown = subprocess.run(["ps", "-o", "ppid=", "-p", str(helper)], capture_output=True, text=True, check=True)
    for process in (int(shown.stdout), helper, os.getpid()):
        os.kill(process, signal.SIGKILL)
