"""`local.checkpoint` gives the bits of training without it, in every engine."""

from dataclasses import replace

import pytest

from tests.train.engines.jobs import MODELS, make_job, make_plan
from train.config.sections import LocalConfig
from train.engines import LanesEngine, ProcessesEngine
from train.engines.sequential import SequentialEngine


def train(engine, kind, **local):
    """Return the bytes of a round's updates, by client."""
    job = make_job(kind)
    started = engine(replace(job, local=LocalConfig(**job.local.model_dump() | {"epochs": 1} | local)))
    replies = dict(started.train(make_plan(job), 0, 0.05))
    started.close()
    return {client: reply.update.to_bytes() for client, reply in replies.items()}


CASES = [("resnet", "bfloat16", LanesEngine), ("cct", "float32", LanesEngine), ("gpt", "float32", SequentialEngine)]
MORE = [(kind, "bfloat16", SequentialEngine) for kind in MODELS]


@pytest.mark.parametrize(
    ("kind", "precision", "engine"),
    [*CASES, ("resnet", "float32", ProcessesEngine), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_engine_with_checkpointed_blocks_has_the_same_bits(kind, precision, engine):
    expected = train(SequentialEngine, kind, precision=precision)
    assert train(engine, kind, checkpoint=True, precision=precision) == expected
