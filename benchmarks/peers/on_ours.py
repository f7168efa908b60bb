"""The workload on this project's `processes` engine. Run by benchmarks/peers.py."""

import torch
from workload import BATCH, COHORT, EPOCHS, LR, PER_USER, ROUNDS, USERS, Stopwatch, data, network

from sharding import ShardPlanner
from sharding.aggregate import Average
from sharding.clients import UniformSampler
from train.config import LocalConfig
from train.data import Dataset, Split
from train.engines import Job, ProcessesEngine
from train.local import Shares


def scale(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1


def main() -> None:
    images, classes = map(torch.from_numpy, data())
    model, nothing = network(), Split(images[:0].clone(), classes[:0].clone())
    dataset = Dataset("cifar10", nothing, nothing, 10, (3, 32, 32), scale)
    local = LocalConfig(epochs=EPOCHS, batch_size=BATCH, lr=LR, momentum=0)
    engine = ProcessesEngine(Job(model, Shares(images, classes, [PER_USER] * USERS), dataset, local, None, 0))
    sampler, planner, watch = UniformSampler(USERS, COHORT, 0), ShardPlanner("dense"), Stopwatch()
    for t in range(ROUNDS + 1):
        plan = planner.plan(model, dict.fromkeys(sampler.invite(t), 1.0), t)
        average = Average(plan, dict.fromkeys(plan, PER_USER))
        for client, update in engine.train(plan, t, LR):
            average.add(client, update.shard)
        assert len(average.write_to(model).accepted) == COHORT
        watch.lap()
    engine.close()
    watch.report()


if __name__ == "__main__":
    main()
