"""Changes of a round for uneven clients: what each leaves as it is, and what it changes."""

import pytest
import torch

from sharding import Server, ShardPlanner
from studies.capacity import Change, build
from tests.train.runs import task_of, tiny
from train.engines import SequentialEngine

UNEVEN = ["recipe=tuned", "keep_ratio={0.2: 0.5, 0.4: 0.5}", "local.decay=0", "local.optimizer.momentum=0"]


@pytest.fixture
def start(tmp_path):
    """Return a function that builds a run with a change, and returns its task, a plan, and a client of each ratio."""

    def make(change, *overrides):
        task = task_of(build(change, tiny(tmp_path, *UNEVEN, *overrides)))
        plan = task.plan(sorted(task.keep_ratios, key=task.keep_ratios.get)[:: len(task.keep_ratios) - 1], 0)
        return task, plan, *plan

    return make


def trained(engine, plan, client, lr=0.1):
    (update,) = (update for trained, update in engine.train(plan, 0, lr) if trained == client)
    assert update.failure is None
    return update.shard


def tail_change(engine, plan, client, side="u"):
    """Return how a client has moved the head and the tail of a layer."""
    layer, n = next(iter(engine.num_weakest.items()))
    moved = getattr(trained(engine, plan, client).terms[layer], side) - getattr(plan.shard(client).terms[layer], side)
    return moved[:, :n], moved[:, n:]


def test_no_change_gives_the_bits_of_the_sequential_engine(start):
    task, plan, weak, strong = start(Change())
    for client in (weak, strong):
        ours, theirs = (trained(engine, plan, client) for engine in (task.engine, SequentialEngine(task.job)))
        assert all(torch.equal(value, theirs.trained()[name]) for name, value in ours.trained().items())


def test_tail_moves_by_the_strong_clients_share_of_samples(start):
    task, plan, weak, strong = start(Change(by_holders=True))
    share = task.num_samples[strong] / (task.num_samples[weak] + task.num_samples[strong])
    head, tail = tail_change(task.engine, plan, strong)
    task.engine.change = Change()
    whole_head, whole_tail = tail_change(task.engine, plan, strong)
    assert torch.equal(head, whole_head)
    torch.testing.assert_close(tail, share * whole_tail, rtol=1e-3, atol=1e-6)


def test_tail_step_scales_the_gradients_of_the_tail_alone(start):
    task, plan, _, strong = start(Change(tail_step=0.5), "local.steps=1")
    head, tail = tail_change(task.engine, plan, strong)
    whole = start(Change(), "local.steps=1")[0].engine
    whole_head, whole_tail = tail_change(whole, plan, strong)
    torch.testing.assert_close(head, whole_head)
    torch.testing.assert_close(tail, 0.5 * whole_tail, rtol=1e-3, atol=1e-7)


def test_nested_strong_client_trains_the_tail_in_some_steps_only(start):
    task, plan, _, strong = start(Change(nested=True), "local.steps=1")
    moved = []
    for round in range(12):
        (update,) = (update.shard for client, update in task.engine.train(plan, round, 0.1) if client == strong)
        layer, n = next(iter(task.engine.num_weakest.items()))
        moved.append(bool((update.terms[layer].u - plan.shard(strong).terms[layer].u)[:, n:].any()))
    assert set(moved) == {True, False}


def test_growing_clients_train_the_weakest_rank_first(start):
    task, *_ = start(Change(growth=0.5))
    assert [set(task.plan([*task.keep_ratios], t).groups) for t in (0, 1)] == [{0.2}, {0.2, 0.4}]


def test_weakest_start_has_the_weakest_rank(start):
    task, _, weak, _ = start(Change(weakest_start=True))
    plan = ShardPlanner("top_n").plan(task.server.model, {weak: 1.0})
    layer, n = next(iter(task.engine.num_weakest.items()))
    magnitudes = plan.spectra[layer].magnitudes
    assert magnitudes[n - 1] > 1e-2 > 1e-5 > magnitudes[n]
    assert isinstance(task.server, Server)
    assert torch.equal(*(next(model.parameters()) for model in (task.server.model, task.server.result)))
