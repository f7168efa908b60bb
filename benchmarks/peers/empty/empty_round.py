"""Flower's own round: an empty message to every node and one back. Run by `deployment.py`."""

from pathlib import Path
from time import perf_counter, sleep

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Time the rounds and write the seconds to a file. In the first round nodes are still starting."""
    settings, seconds = context.run_config, []
    while len(nodes := list(grid.get_node_ids())) < int(settings["nodes"]):
        sleep(0.5)
    for _ in range(int(settings["rounds"])):
        start = perf_counter()
        waiting = set(
            grid.push_messages([Message(RecordDict(), dst_node_id=n, message_type=MessageType.TRAIN) for n in nodes])
        )
        while waiting:
            waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(list(waiting))}
            sleep(0.5 if waiting else 0)
        seconds.append(str(perf_counter() - start))
    Path(str(settings["output"])).write_text("\n".join(seconds), encoding="utf-8")


@client.train()
def train(message: Message, context: Context) -> Message:
    """Reply with an empty message."""
    return Message(RecordDict(), reply_to=message)
