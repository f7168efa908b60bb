"""Spectral sharding in a Flower app: a strategy for the `ServerApp`, and functions for the `ClientApp`.

The server's app, with a model, a planner and any torch optimizer::

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model = make_model()
        server = Server(model, ShardPlanner("top_n"), torch.optim.SGD(model.parameters(), lr=1.0))
        SpectralSharding(server, fraction_evaluate=0.0).start(grid, num_rounds=3)

The client's app, with the user's own loop; `fit(model, config)` returns ``{"num-examples": …}`` and other metrics::

    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return query_message(message, context)  # reports keep-ratio and partition-id of the node's configuration

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with init_empty():
            structure = make_model()
        return train_message(message, context, structure, fit)
"""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError("sharding.flower needs the package flwr: pip install 'spectral-sharding[flower]'")

from sharding.flower.client import evaluate_message, query_message, train_message
from sharding.flower.strategy import SpectralSharding

__all__ = ["SpectralSharding", "evaluate_message", "query_message", "train_message"]
