"""A node: it trains a part of the model on its own data."""

from functools import partial

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from digits.task import KEEP_RATIOS, fit, load_data, make_model, test
from sharding import init_empty
from sharding.flower import evaluate_message, query_message, train_message

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Report the keep ratio in the node's configuration; a simulation's nodes have none, so they take turns."""
    partition = context.node_config["partition-id"]
    return query_message(message, context, keep_ratio=KEEP_RATIOS[partition % 2])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the node's shard of the model, which takes no more memory than its terms."""
    with init_empty():
        structure = make_model()
    data = load_data(context.node_config["partition-id"])
    return train_message(message, context, structure, partial(fit, data=data))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the largest terms that the node can afford, on its own data."""
    with init_empty():
        structure = make_model()
    data = load_data(context.node_config["partition-id"])
    return evaluate_message(message, context, structure, partial(test, data=data))
