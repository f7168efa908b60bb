"""A node's app with faults, by what its configuration says of it; the tests pack it with the sources and run it."""

import os
import signal
import subprocess
import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from train.federate import client_app

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
    return reply


def end_this_node() -> None:
    """End the SuperNode, its helper and this process, as a machine that loses its power."""
    helper = os.getppid()
    shown = subprocess.run(["ps", "-o", "ppid=", "-p", str(helper)], capture_output=True, text=True, check=True)
    for process in (int(shown.stdout), helper, os.getpid()):
        os.kill(process, signal.SIGKILL)
