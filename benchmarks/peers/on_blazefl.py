"""The workload on BlazeFL, with one thread a client. Run by benchmarks/peers.py.

Two processes that return updates in shared memory; with PEERS_TUNED set, two threads of one process.
"""

import os
import tempfile
from pathlib import Path

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer, FedAvgThreadPoolClientTrainer
from blazefl.core import IPCMode, ModelSelector, PartitionedDataset
from torch.utils.data import DataLoader, Dataset, TensorDataset
from workload import BATCH, COHORT, EPOCHS, LR, ROUNDS, USERS, Stopwatch, network, no_arguments, user_data

WORKERS = 2


class Networks(ModelSelector):
    """The one network."""

    def select_model(self, model_name: str) -> torch.nn.Module:
        """Build it."""
        return network()


class Users(PartitionedDataset):
    """Reads a user's images on access, as the other simulators do."""

    def get_dataset(self, type_: str, cid: int | None) -> Dataset:
        """Return a user's images."""
        return TensorDataset(*user_data(cid))

    def set_dataset(self, type_: str, cid: int | None, dataset: Dataset) -> None:
        """Keep nothing: the images do not change."""

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None = None, generator: torch.Generator | None = None
    ) -> DataLoader:
        """Return shuffled batches of a user's images."""
        return DataLoader(self.get_dataset(type_, cid), batch_size, shuffle=True, generator=generator)


def main() -> None:
    torch.set_num_threads(1)
    networks, users, watch = Networks(), Users(), Stopwatch()
    server = FedAvgBaseServerHandler(networks, "", users, ROUNDS + 1, USERS, COHORT / USERS, "cpu", BATCH, 0)
    with tempfile.TemporaryDirectory() as folder:
        common = {"dataset": users, "device": "cpu", "num_clients": USERS, "epochs": EPOCHS, "batch_size": BATCH}
        common |= {"lr": LR, "seed": 0, "num_parallels": WORKERS}
        if os.environ.get("PEERS_TUNED"):
            clients = FedAvgThreadPoolClientTrainer(networks, "", **common)
        else:
            shared, states = Path(folder) / "shared", Path(folder) / "states"
            common |= {"share_dir": shared, "state_dir": states, "ipc_mode": IPCMode.SHARED_MEMORY}
            clients = FedAvgProcessPoolClientTrainer(networks, "", **common)
        while not server.if_stop():
            clients.local_process(server.downlink_package(), server.sample_clients())
            for package in clients.uplink_package():
                server.load(package)
            watch.lap()
    watch.report("blazefl")


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
