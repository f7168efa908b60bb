"""`local.checkpoint` gives the bits of training without it, in every engine."""

import pytest
import torch

from tests.train.engines.jobs import MODELS, trained
from train.engines import LanesEngine, ProcessesEngine
from train.engines.sequential import SequentialEngine

CASES = [("resnet", "bfloat16", LanesEngine), ("cct", "float32", LanesEngine), ("gpt", "float32", SequentialEngine)]
MORE = [(kind, "bfloat16", SequentialEngine) for kind in MODELS]


@pytest.mark.parametrize(
    ("kind", "precision", "engine"),
    [*CASES, ("resnet", "float32", ProcessesEngine), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_engine_with_checkpointed_blocks_has_the_same_bits(kind, precision, engine):
    local = {"epochs": 1, "precision": precision}
    expected = trained(SequentialEngine, kind, **local)
    torch.testing.assert_close(trained(engine, kind, checkpoint=True, **local), expected, rtol=0, atol=0)
