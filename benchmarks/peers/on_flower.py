"""The workload on Flower's simulation (Ray). Run by benchmarks/peers.py.

As in its examples each client gets two cores, Flower's default; with PEERS_TUNED set, one core and one thread.
"""

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import COHORT, ROUNDS, USERS, Stopwatch, network, no_arguments, train, user_data

TUNED = bool(os.environ.get("PEERS_TUNED"))
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    if TUNED:
        torch.set_num_threads(1)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = user_data(int(context.node_config["partition-id"]))
    train(model.train(), inputs, targets)
    metrics = MetricRecord({"num-examples": len(targets)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    watch = Stopwatch()

    def note_the_time(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round:  # it is also called before the first round
            watch.lap()
        return MetricRecord({})

    strategy = FedAvg(fraction_train=COHORT / USERS, fraction_evaluate=0.0, min_available_nodes=USERS)
    arrays = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS + 1, evaluate_fn=note_the_time)
    watch.report("flwr")


if __name__ == "__main__":
    no_arguments(__doc__)
    one_core = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=USERS, backend_config=one_core if TUNED else None)
