"""Every engine against the sequential one, client by client and after the average."""

from copy import deepcopy
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn

from sharding import aggregate
from tests.train.engines.jobs import MODELS, RATIOS, SIZES, make_job, make_plan, stack_always, tensors, with_bad_clients
from train.engines.sequential import SequentialEngine
from train.engines.stacked import StackedEngine, cut

LR = 0.05


@pytest.fixture(autouse=True)
def _stack_always(monkeypatch):
    stack_always(monkeypatch)


def averaged(job, plan, engine):
    model = deepcopy(job.model)
    updates = {client: update.shard for client, update in engine.train(plan, 0, LR)}
    aggregate(model, plan, updates, dict(enumerate(SIZES)))
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["unbiased", "dense"])
@pytest.mark.parametrize("kind", MODELS)
def test_stacked_is_sequential(kind, strategy):
    job = make_job(kind)
    plan = make_plan(job, strategy)
    engine = StackedEngine(job)
    assert max(len(bunch.clients) for bunch in engine.bunches(plan)) >= 4
    alone, together = dict(SequentialEngine(job).train(plan, 0, LR)), dict(engine.train(plan, 0, LR))
    assert alone.keys() == together.keys() == plan.keys()
    for client, update in alone.items():
        other = together[client]
        assert other.failure is None
        torch.testing.assert_close(other.loss, update.loss, rtol=0, atol=1e-5)
        for (name, mine), (_, theirs) in zip(tensors(update.shard), tensors(other.shard), strict=True):
            torch.testing.assert_close(
                theirs, mine, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    one, other = (averaged(job, plan, engine) for engine in (SequentialEngine(job), engine))
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine])
def test_a_scale_of_a_clients_steps_is_its_own_step_size(engine):
    job = make_job()
    plan = make_plan(job)
    scaled = dict(engine(replace(job, step_scales={3: 0.5, 4: 2.0})).train(plan, 0, LR))
    for client in plan:
        (_, alone), *_ = SequentialEngine(job).train({client: plan[client]}, 0, LR * {3: 0.5, 4: 2.0}.get(client, 1.0))
        for (_, mine), (_, theirs) in zip(tensors(alone.shard), tensors(scaled[client].shard), strict=True):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_stacked_is_sequential_where_everybody_takes_as_many_steps(kind):
    job = make_job(kind, steps=3)
    plan = make_plan(job)
    alone, together = dict(SequentialEngine(job).train(plan, 0, LR)), dict(StackedEngine(job).train(plan, 0, LR))
    for client, update in alone.items():
        torch.testing.assert_close(together[client].loss, update.loss, rtol=0, atol=1e-5)
        for (_, mine), (_, theirs) in zip(tensors(update.shard), tensors(together[client].shard), strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_frozen_parameters_stay_at_the_server_with_every_engine(kind):
    job = make_job(kind)
    for place, parameter in enumerate(job.model.parameters()):
        parameter.requires_grad_(place % 5 not in (0, 1))
    plan = make_plan(job)
    frozen = plan[0].frozen
    assert frozen & plan[0].terms.keys()
    assert frozen & plan[0].dense.keys()
    assert plan[0].terms.keys() - frozen
    engine = StackedEngine(job)
    alone, together = dict(SequentialEngine(job).train(plan, 0, LR)), dict(engine.train(plan, 0, LR))
    for client, update in alone.items():
        assert together[client].shard.trained().keys() == update.shard.trained().keys() == plan[client].trained().keys()
        for (name, mine), (_, theirs) in zip(tensors(update.shard), tensors(together[client].shard), strict=True):
            assert name.removesuffix(".u").removesuffix(".v") not in frozen
            torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5)
    assert engine._profiles  # they were trained together indeed
    before, after = job.model.state_dict(), averaged(job, plan, SequentialEngine(job))
    flags = {name: parameter.requires_grad for name, parameter in job.model.named_parameters()}
    assert all(torch.equal(after[name], before[name]) != trains for name, trains in flags.items())


@pytest.mark.parametrize("kind", MODELS)
def test_stacked_is_sequential_with_scaled_steps(kind):
    job = make_job(kind, optimizer="scaled_sgd")
    plan, plain = make_plan(job), make_job(kind)
    alone, together = (dict(engine(job).train(plan, 0, 0.01)) for engine in (SequentialEngine, StackedEngine))
    otherwise = dict(SequentialEngine(plain).train(plan, 0, 0.01))
    for client, update in alone.items():
        for (name, mine), (_, theirs) in zip(tensors(update.shard), tensors(together[client].shard), strict=True):
            torch.testing.assert_close(
                theirs, mine, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        pairs = zip(tensors(update.shard), tensors(otherwise[client].shard), strict=True)
        assert not any(torch.equal(a, b) for (name, a), (_, b) in pairs if name.endswith((".u", ".v")))


@pytest.mark.parametrize("of", ["bounded", "effective", "factors"])
@pytest.mark.parametrize("clip", [None, 2.0])
def test_engines_decay_alike_where_the_bound_binds(of, clip):
    """So strong a decay that the bound lowers most multipliers; few steps, for the literal form would diverge."""
    job = make_job(clip=clip, epochs=1, frobenius_decay=0.1, frobenius_decay_of=of)
    plan = make_plan(job)
    alone, together = (dict(engine(job).train(plan, 0, 0.01)) for engine in (SequentialEngine, StackedEngine))
    for client, update in alone.items():
        pairs = zip(tensors(update.shard), tensors(together[client].shard), strict=True)
        for (name, mine), (_, theirs) in pairs:
            torch.testing.assert_close(
                theirs, mine, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine])
@pytest.mark.parametrize("kind", MODELS)
def test_bfloat16_is_near_float32_and_leaves_the_shards_in_float32(kind, engine):
    exact, rough = make_job(kind), make_job(kind, precision="bfloat16")
    plan = make_plan(exact)
    expected, updates = (dict(engine(job).train(plan, 0, LR)) for job in (exact, rough))
    for client, update in updates.items():
        assert update.failure is None
        assert 0 < abs(update.loss - expected[client].loss) < 0.05 * expected[client].loss
        assert {tensor.dtype for _, tensor in tensors(update.shard)} == {torch.float32}


@pytest.mark.parametrize("kind", MODELS)
def test_a_rerun_gives_the_same_bits_and_residents_keep_nothing(kind):
    job = make_job(kind)
    engine, plan = StackedEngine(job), make_plan(job)
    first = dict(engine.train(plan, 0, LR))
    list(engine.train(plan, 1, LR))
    for other in (dict(engine.train(plan, 0, LR)), dict(StackedEngine(job).train(plan, 0, LR))):
        assert list(other) == list(first)
        for client, update in first.items():
            assert torch.equal(update.loss, other[client].loss)
            for (_, mine), (_, theirs) in zip(tensors(update.shard), tensors(other[client].shard), strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine])
def test_a_clients_failure_is_its_own(engine):
    sound = make_job("resnet")
    plan = make_plan(sound)
    expected = dict(SequentialEngine(sound).train(plan, 0, LR))
    job = with_bad_clients(sound)
    updates = dict(engine(job).train(plan, 0, LR))
    assert "IndexError" in updates[2].failure
    assert "AttributeError" in updates[5].failure or "TypeError" in updates[5].failure
    outcome = aggregate(deepcopy(job.model), plan, {c: u.shard for c, u in updates.items()}, dict(enumerate(SIZES)))
    assert set(outcome.rejected) == {0, 2, 5}
    assert "NaN or Inf" in outcome.rejected[0]
    for client in (1, 3, 4, 6):
        for (_, mine), (_, theirs) in zip(tensors(expected[client].shard), tensors(updates[client].shard), strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5)


def test_bad_clients_do_not_stop_the_trial_that_sees_them_first(monkeypatch):
    monkeypatch.undo()
    job = with_bad_clients(make_job("resnet"))
    updates = dict(StackedEngine(job).train(make_plan(job), 0, LR))
    assert {client for client, update in updates.items() if update.failure is None} == {0, 1, 3, 4, 6}


def test_a_nan_stays_with_its_client_while_it_is_trained_beside_others():
    sound = make_job("resnet")
    plan = make_plan(sound)
    job = make_job("resnet")
    job.clients[3] = type(job.clients[3])(job.clients[3].inputs * float("nan"), job.clients[3].targets)
    clean, dirty = (dict(StackedEngine(each).train(plan, 0, LR)) for each in (sound, job))
    assert dirty[3].loss.isnan()
    for client in set(plan) - {3}:
        for (_, mine), (_, theirs) in zip(tensors(clean[client].shard), tensors(dirty[client].shard), strict=True):
            assert torch.equal(mine, theirs)


def test_bunches_are_of_one_keep_ratio_and_start_with_the_longest():
    job = make_job()
    bunches = StackedEngine(job).bunches(make_plan(job))
    assert sorted(client for bunch in bunches for client in bunch.clients) == list(range(7))
    for bunch in bunches:
        assert {RATIOS[client] for client in bunch.clients} == {bunch.ratio}
        steps = [-(-SIZES[client] // 4) for client in bunch.clients]
        assert steps == sorted(steps, reverse=True)


def test_no_client_waits_longer_than_it_works():
    def bunches(*work, spread=2.0):
        return [work[its] for its in cut(work, 3, spread)]

    assert bunches(19, 19, 10, 10, 9, 2, 1, 1, 1) == [(19, 19, 10), (10, 9), (2, 1, 1), (1,)]
    assert bunches(4, 1, 1, 1, 1) == [(4,), (1, 1, 1), (1,)]
    assert bunches(4, 1, 1, 1, 1, spread=inf) == [(4, 1, 1), (1, 1)]
    assert bunches(5) == [(5,)]
    assert bunches() == []


class Mixing(nn.Module):
    """Looks at other samples of its batch."""

    def forward(self, x):
        return x - x.mean(dim=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x))


@pytest.mark.parametrize("part", [Mixing(), nn.BatchNorm1d(64), Tied()], ids=["mixing", "batch norm", "tied"])
def test_a_model_that_cannot_be_folded_is_trained_one_by_one(part):
    job = make_job(model=nn.Sequential(nn.Flatten(), part, nn.Linear(64, 5)))
    plan = make_plan(job, "dense")
    engine = StackedEngine(job)
    assert all(len(bunch.clients) == 1 for bunch in engine.bunches(plan))
    updates = dict(engine.train(plan, 0, LR))
    for client, update in SequentialEngine(job).train(plan, 0, LR):
        other = updates[client]
        assert (other.shard is None) == (update.shard is None) == (other.failure is not None)
        if update.shard is None:  # batch norm needs more than the one sample that some batches have
            continue
        for (_, mine), (_, theirs) in zip(tensors(update.shard), tensors(other.shard), strict=True):
            assert torch.equal(mine, theirs)
