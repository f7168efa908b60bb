"""`local.checkpoint` gives the bits of training without it, in every engine."""

from dataclasses import replace

import pytest

from tests.train.engines.jobs import MODELS, make_job, make_plan
from train.config.sections import LocalConfig
from train.engines import LanesEngine, ProcessesEngine
from train.engines.sequential import SequentialEngine
from train.run import threads


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


def train(engine, kind, **local):
    """Return the bytes of a round's updates, by client."""
    job = make_job(kind)
    started = engine(replace(job, local=LocalConfig(**job.local.model_dump() | local)))
    replies = dict(started.train(make_plan(job), 0, 0.05))
    started.close()
    return {client: reply.update.to_bytes() for client, reply in replies.items()}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *((kind, "float32") for kind in MODELS),
        ("resnet", "bfloat16"),
        *(pytest.param(kind, "bfloat16", marks=pytest.mark.slow) for kind in ("cct", "gpt")),
    ],
)
def test_engines_with_checkpointed_blocks_have_the_same_bits(kind, precision):
    expected = train(SequentialEngine, kind, precision=precision)
    for engine in (SequentialEngine, LanesEngine):
        assert train(engine, kind, checkpoint=True, precision=precision) == expected


def test_processes_with_checkpointed_blocks_have_the_same_bits():
    assert train(ProcessesEngine, "resnet", checkpoint=True) == train(SequentialEngine, "resnet")
