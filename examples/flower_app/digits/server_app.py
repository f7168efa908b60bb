"""The server: it holds the model, and sends each node the terms that the node can afford."""

import torch
from flwr.app import ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits.task import KEEP_RATIOS, load_data, make_model, test
from sharding import recipes
from sharding.flower import SpectralSharding

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds; test the whole model after each."""
    torch.manual_seed(0)
    whole, data = make_model(), load_data()
    strategy = SpectralSharding(recipes.tuned(make_model(), KEEP_RATIOS))

    def evaluate(server_round, arrays):
        whole.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(test(whole, {}, data))

    config = ConfigRecord({"lr": context.run_config["lr"]})
    strategy.start(grid, num_rounds=context.run_config["rounds"], train_config=config, evaluate_fn=evaluate)
