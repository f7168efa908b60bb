"""`local.compile` gives the numbers of eager training, up to rounding, and compiles each keep ratio once."""

import pytest
import torch
from torch import nn

from tests.train.engines.jobs import MODELS, RATIOS, trained
from train.engines import LanesEngine, ProcessesEngine
from train.engines.sequential import SequentialEngine

CASES = [*((SequentialEngine, kind) for kind in MODELS), (LanesEngine, "resnet"), (ProcessesEngine, "resnet")]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow  # a compiler of C++ runs
@pytest.mark.parametrize(("engine", "kind"), CASES)
def test_compiled_model_trains_as_an_eager_one(engine, kind):
    torch.testing.assert_close(
        trained(engine, kind, compile=True), trained(SequentialEngine, kind), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("engine", [SequentialEngine, LanesEngine])
def test_full_batches_of_each_keep_ratio_are_compiled_once(engine, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_eagerly(module, *, dynamic, options):
        module._compiled_call_impl = torch.compile(module._call_impl, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    found = trained(engine, "resnet", compile=True)
    assert len(graphs) == len(set(RATIOS))  # no graph is broken, and none is made for a smaller batch
    torch.testing.assert_close(found, trained(SequentialEngine, "resnet"), rtol=0, atol=0)
    assert len(graphs) == len(set(RATIOS))


@pytest.mark.slow
def test_compiled_model_with_checkpointed_blocks_trains_as_an_eager_one():
    compiled = trained(SequentialEngine, "resnet", compile=True, checkpoint=True)
    torch.testing.assert_close(compiled, trained(SequentialEngine, "resnet"), rtol=1e-4, atol=1e-5)
