"""Small jobs of every kind of model: unequal clients, several keep ratios, dropout."""

from dataclasses import replace

import torch
from torch import nn

from models import build_model
from sharding import ShardPlanner
from train.config.sections import LocalConfig
from train.data import Dataset, Split
from train.data.dataset import flip, standardize, unchanged
from train.engines import Job

SIZES = (13, 3, 7, 10, 5, 1, 8)  # with batches of 4: from 1 to 4 steps an epoch, most with a ragged end
RATIOS = (0.3, 0.6, 0.3, 0.3, 0.3, 0.6, 0.6)
MODELS = {
    "resnet": ("resnet18_gn", {"width": 4, "groups": 2, "blocks": [1, 1]}),
    "cct": ("cct_6_3x2", {"dim": 16, "depth": 2, "heads": 2, "attention_dropout": 0.2, "stochastic_depth": 0.3}),
    "gpt": ("gpt_tiny", {"width": 16, "depth": 2, "heads": 2, "dropout": 0.2}),
}


def make_job(kind: str = "resnet") -> Job:
    """A job of seven clients."""
    rng = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    if kind == "gpt":
        inputs, targets = (torch.randint(11, (total, 6), generator=rng) for _ in range(2))
        parts = (11, (6,), unchanged, None, 0)
    else:
        inputs = torch.randint(256, (total, 1, 8, 8), generator=rng, dtype=torch.uint8)
        targets = torch.randint(5, (total,), generator=rng)
        parts = (5, (1, 8, 8), standardize, flip, -100)
    split = Split(inputs, targets)
    dataset = Dataset("toy", split, split, *parts)
    torch.manual_seed(1)
    name, options = MODELS[kind]
    model = build_model(name, input_shape=parts[1], num_classes=parts[0], **options)
    clients = {c: Split(*data) for c, data in enumerate(zip(inputs.split(SIZES), targets.split(SIZES), strict=True))}
    local = LocalConfig(epochs=2, batch_size=4, optimizer={"name": "sgd", "lr": 0.02, "momentum": 0.9}, decay=1e-3)
    return Job(model, clients, dataset, local, seed=0)


def make_plan(job: Job, strategy: str = "unbiased", round: int = 0):
    return ShardPlanner(strategy, seed=job.seed, clip=2.0).plan(job.model, dict(enumerate(RATIOS)), round)


def with_bad_clients(job: Job) -> Job:
    """The same job, but client 0's data is NaN, client 2 has a class that does not exist, and client 5 no inputs."""
    nan, wrong, empty = (job.clients[client] for client in (0, 2, 5))
    bad = {
        0: Split(nan.inputs * float("nan"), nan.targets),
        2: Split(wrong.inputs, wrong.targets + 100),
        5: Split(empty.inputs[:0], empty.targets),
    }
    return replace(job, clients=dict(job.clients) | bad)


def trained(engine, kind, **local):
    """Return the updates of a round, by client, with other options of local training if given."""
    job = make_job(kind)
    started = engine(replace(job, local=LocalConfig(**job.local.model_dump() | local)))
    replies = dict(started.train(make_plan(job), 0, 0.05))
    started.close()
    return {client: reply.update.trained() for client, reply in replies.items()}


class Shrinking(nn.Module):
    """Has a buffer that each forward pass changes in place, which is not sent."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, inputs):
        self.scale *= 0.9
        return self.scale * inputs


def assert_equal(expected, replies, **tolerance):
    """Check clients, failures, losses and updates; to the bit by default."""
    tolerance = {"equal_nan": True} | (tolerance or {"rtol": 0, "atol": 0})
    assert [client for client, _ in replies] == [client for client, _ in expected]
    for (_, mine), (_, theirs) in zip(replies, expected, strict=True):
        assert mine.failure == theirs.failure
        if mine.update is not None:
            torch.testing.assert_close(mine.loss, theirs.loss, **tolerance)
            assert mine.update.terms.keys() == theirs.update.terms.keys()
            torch.testing.assert_close(mine.update.trained(), theirs.update.trained(), **tolerance)
