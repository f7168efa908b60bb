"""The workload on this project's `processes` engine. Run by benchmarks/peers.py.

With PEERS_TUNED set, each client trains a shard of a fifth of the terms, the largest ones.
"""

import os
from collections.abc import Iterator, Mapping

import torch
from workload import BATCH, COHORT, EPOCHS, LR, PER_USER, ROUNDS, USERS, Stopwatch, network, no_arguments, samples

from sharding import Server, ShardPlanner
from sharding.client_sampling import UniformSampler
from sharding.rounds.plan import Client
from train.config.sections import LocalConfig
from train.data import Dataset, Split
from train.engines import Job, ProcessesEngine


class Users(Mapping[Client, Split]):
    """Reads a user's images on access, as the other simulators do."""

    def __getitem__(self, user: Client) -> Split:
        return Split(*samples(int(user)))

    def __iter__(self) -> Iterator[Client]:
        return iter(range(USERS))

    def __len__(self) -> int:
        return USERS


def scale(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1


def main() -> None:
    torch.set_num_threads(1)  # as `train.run` does, beside the processes
    model, nothing = network(), Split(torch.empty(0, 3, 32, 32), torch.empty(0, dtype=torch.int64))
    dataset = Dataset("cifar10", nothing, nothing, 10, (3, 32, 32), scale)
    local = LocalConfig(epochs=EPOCHS, batch_size=BATCH, optimizer={"name": "sgd", "lr": LR, "momentum": 0})
    engine = ProcessesEngine(Job(model, Users(), dataset, local, 0))
    strategy, keep_ratio = ("top_n", 0.2) if os.environ.get("PEERS_TUNED") else ("dense", 1.0)
    sampler, server, watch = UniformSampler(USERS, COHORT, 0), Server(model, ShardPlanner(strategy)), Stopwatch()
    for t in range(ROUNDS + 1):
        plan = server.plan(dict.fromkeys(sampler.cohort(t), keep_ratio), t)
        average = server.average(plan, dict.fromkeys(plan, PER_USER))
        for client, reply in engine.train(plan, t, LR):
            average.add(client, reply.update)
        assert len(server.step(average).accepted) == COHORT
        watch.lap()
    engine.close()
    watch.report()


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
