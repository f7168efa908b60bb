"""The engine nobody has to choose."""

import pytest
import torch

from tests.train.engines.jobs import make_job, make_plan, tensors
from train.engines import auto
from train.engines.processes import ProcessesEngine
from train.engines.stacked import StackedEngine

LR = 0.05


@pytest.mark.parametrize("in_a_worker", [False, True])
def test_workers_are_started_once_they_pay_and_no_result_shows_it(in_a_worker, monkeypatch):
    monkeypatch.setattr(auto, "start_method", lambda: "spawn")
    monkeypatch.setitem(auto.PATIENCE, "spawn", 1e-9)
    monkeypatch.setattr(auto, "num_cores", lambda: 2)
    monkeypatch.setattr(auto, "parent_process", lambda: object() if in_a_worker else None)
    job = make_job()
    threads = torch.get_num_threads()
    engine = auto.auto_engine(job)
    try:
        for round, kind in enumerate([StackedEngine, StackedEngine if in_a_worker else ProcessesEngine]):
            plan = make_plan(job, round=round)
            updates = list(engine.train(plan, round, LR))
            assert type(engine._engine) is kind
            for (client, mine), (other, theirs) in zip(StackedEngine(job).train(plan, round, LR), updates, strict=True):
                assert client == other
                values = dict(tensors(theirs.shard))
                assert all(torch.equal(tensor, values[name]) for name, tensor in tensors(mine.shard))
    finally:
        engine.close()
    assert torch.get_num_threads() == threads


def test_workers_that_are_forked_pay_at_once(monkeypatch):
    monkeypatch.setattr(auto, "start_method", lambda: "fork")
    monkeypatch.setattr(auto, "num_cores", lambda: 2)
    monkeypatch.setattr(auto, "parent_process", lambda: None)
    job = make_job()
    engine = auto.auto_engine(job)
    try:
        list(engine.train(make_plan(job), 0, LR))
        assert type(engine._engine) is ProcessesEngine
    finally:
        engine.close()
