"""The app in examples/flower_app, with Flower's FedAvg or with `SpectralSharding`. Run by `deployment.py --start`."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from examples.flower_app.digits.task import fit, load_data, make_model
from sharding import Server, ShardPlanner, init_empty
from sharding.flower import SpectralSharding, query_message, train_message

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Write the seconds of each round, one a line."""
    settings, model, ends = context.run_config, make_model(), []

    def note_the_time(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(perf_counter())

    strategy = FedAvg(fraction_evaluate=0.0)
    if settings["strategy"] != "FedAvg":
        strategy = SpectralSharding(Server(model, ShardPlanner("top_n")), fraction_evaluate=0.0)
    config = ConfigRecord({"lr": 0.01, "strategy": settings["strategy"]})
    arrays = ArrayRecord(model.state_dict())
    strategy.start(grid, arrays, int(settings["rounds"]), train_config=config, evaluate_fn=note_the_time)
    seconds = [str(end - begin) for begin, end in pairwise(ends)]
    Path(str(settings["output"])).write_text("\n".join(seconds), encoding="utf-8")


@client.query()
def query(message: Message, context: Context) -> Message:
    """Report a keep ratio."""
    return query_message(message, context, keep_ratio=0.25)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train a shard, or with FedAvg the whole model."""
    config = message.content["config"]
    data = load_data(context.node_config["partition-id"])
    if config["strategy"] != "FedAvg":
        with init_empty():
            structure = make_model()
        return train_message(message, context, structure, partial(fit, data=data))
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord(fit(model, config, data))
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
