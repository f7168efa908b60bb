"""Lanes against `sequential`: to the bit in eager steps, and with steps that are recorded as a GPU captures them."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from models import build_model
from models.gru import GRU
from sharding import ShardPlanner, factorize
from tests.train.engines.jobs import MODELS, RATIOS, SIZES, Shrinking, assert_equal, make_job, make_plan
from tests.train.engines.recorder import Recorder
from train.config.sections import LocalConfig
from train.data import Split
from train.engines import LanesEngine
from train.engines.capture import CAPTURES, WARM_UP
from train.engines.lanes import PADDED, cut, pad
from train.engines.sequential import SequentialEngine
from train.registries import LOSSES

LR = 0.05
KINDS = [*MODELS, "gru", "batch_norm"]
ADAMW = {"name": "adamw", "lr": 0.02}
NESTEROV = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


@pytest.fixture
def recorder(monkeypatch):
    """Steps on the CPU are recorded as on a GPU."""
    monkeypatch.setitem(CAPTURES, "cpu", Recorder)
    monkeypatch.setattr(Recorder, "replays", 0)
    return Recorder


def job_of(kind, **local):
    """A job of seven unequal clients, with other options of local training if given."""
    job = make_job("gpt" if kind == "gru" else kind if kind in MODELS else "resnet")
    torch.manual_seed(1)
    if kind == "gru":
        job = replace(job, model=build_model("gru", input_shape=(6,), num_classes=11, width=8))
    if kind == "batch_norm":
        hidden = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        first, last = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()], [nn.Flatten(), nn.Linear(288, 5)]
        job = replace(job, model=nn.Sequential(*first, *hidden, *last))
    return replace(job, local=LocalConfig(**job.local.model_dump() | local))


def planner_of(strategy="unbiased", **options):
    return ShardPlanner(strategy, clip=2.0, **options)


def assert_as_sequential(job, planner=None, num_lanes=3, **tolerance):
    """Train two rounds with both engines, the second on another model of the server."""
    planner = planner or planner_of("dense" if isinstance(job.model, GRU) else "unbiased")
    job = replace(job, frozen=planner.frozen(job.model))
    lanes, sequential, model = LanesEngine(job, num_lanes), SequentialEngine(job), deepcopy(job.model)
    for round in (0, 1):
        plan = planner.plan(model, dict(enumerate(RATIOS)), round)
        replies = list(lanes.train(plan, round, LR / (1 + round)))
        assert_equal(list(sequential.train(plan, round, LR / (1 + round))), replies, **tolerance)
        assert any(reply.update is not None for _, reply in replies)
        with torch.no_grad():
            for parameter in (part for part in model.parameters() if part.requires_grad):
                parameter *= 1.1
    return lanes


# A captured step has the learning rate in a tensor of 32 bits, where `sequential` has a number of 64.
ROUNDED = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(("kind", "num_lanes"), [*((kind, 3) for kind in KINDS), ("batch_norm", 1), ("batch_norm", 9)])
def test_lanes_equal_sequential(kind, num_lanes):
    assert_as_sequential(job_of(kind), num_lanes=num_lanes)


def empty(data):
    return Split(data.inputs[:0], data.targets[:0])


@pytest.mark.parametrize("engine", [SequentialEngine, LanesEngine])
def test_client_without_samples_fails_where_each_has_as_many_steps(engine):
    job = job_of("resnet", steps=4)
    job = replace(job, clients={**job.clients, 2: empty(job.clients[2])})
    replies = dict(engine(job).train(planner_of().plan(job.model, dict(enumerate(RATIOS)), 0), 0, LR))
    assert [client for client, reply in replies.items() if reply.update is None] == [2]
    assert "no samples to train on" in str(replies[2].failure)


CAPTURED = [  # each option with another optimizer
    {"optimizer": ADAMW, "precision": "bfloat16"},
    {"optimizer": NESTEROV, "decay": 2.0, "decay_of": "effective"},
    {"steps": 3},
    {"batch_size": 100},
]
LOCALS = [
    *CAPTURED,
    {"optimizer": ADAMW | {"amsgrad": True}},
    {"optimizer": {"name": "rmsprop", "lr": 0.02, "momentum": 0.5, "centered": True}},
    {"optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9, "dampening": 0.5}},
    {"optimizer": {"name": "adagrad", "lr": 0.02, "initial_accumulator_value": 0.1}},
    {"optimizer": {"name": "adafactor", "lr": 0.02}},
]


@pytest.mark.parametrize("local", LOCALS, ids=str)
def test_lanes_with_any_local_training_equal_sequential(local):
    assert_as_sequential(job_of("batch_norm", **local))


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_equal_sequential(kind, recorder):
    engine = assert_as_sequential(job_of(kind), num_lanes=2, **ROUNDED)
    assert engine._capturing.enabled
    assert recorder.replays > 20


@pytest.mark.parametrize("local", CAPTURED, ids=str)
def test_recorded_steps_with_any_local_training_equal_sequential(local, recorder):
    engine = assert_as_sequential(job_of("batch_norm", **{"epochs": 4} | local), num_lanes=1, **ROUNDED)
    assert engine._capturing.enabled
    assert recorder.replays > 0


@pytest.mark.parametrize("strategy", ["unbiased", "dense", "top_n"])
def test_recorded_steps_with_tails_and_frozen_layers_equal_sequential(strategy, recorder):
    job, planner = job_of("resnet"), planner_of(strategy)
    for index, parameter in enumerate(job.model.parameters()):
        parameter.requires_grad_(index % 5 not in (0, 1))
    tails = [bool(shard.tail) for _, shard in planner.plan(job.model, {0: 0.3, 1: 0.6}).shards()]
    assert any(tails) is (strategy == "top_n")
    assert_as_sequential(job, planner, num_lanes=2, **ROUNDED)
    assert recorder.replays > 20


def with_residual(kind):
    """A job of a model in factors on a residual."""
    job = job_of(kind)
    return replace(job, model=factorize(job.model, 0.6, residual_format="int4"))


@pytest.mark.parametrize("kind", ["resnet", "gpt"])
def test_lanes_with_a_residual_and_a_tail_equal_sequential(kind):
    assert_as_sequential(with_residual(kind), planner_of("top_n"))


def test_recorded_steps_with_a_residual_and_a_tail_equal_sequential(recorder):
    assert_as_sequential(with_residual("resnet"), planner_of("top_n"), **ROUNDED)
    assert recorder.replays > 20


# With a rounding of updates, one step of it.
COARSE = {"bfloat16": {"rtol": 1e-2, "atol": 1e-4}, "int8": {"rtol": 0, "atol": 2e-3}}


@pytest.mark.parametrize(("kind", "compression"), [("resnet", "int8"), ("cct", "float32"), ("gpt", "bfloat16")])
def test_padded_terms_change_nothing_but_the_order_of_sums(kind, compression, monkeypatch):
    monkeypatch.setitem(PADDED, "cpu", 8)
    assert_as_sequential(job_of(kind), planner_of(compression=compression), **COARSE.get(compression, ROUNDED))


def test_pad_adds_zeros_up_to_the_rank_and_cut_removes_them():
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 5), nn.Linear(5, 5))
    shard = ShardPlanner("top_n").plan(model, {0: 0.5}).shard(0)
    padded = pad(shard, model, 8)
    assert {name: terms.indices.numel() for name, terms in padded.terms.items()} == {"1": 16, "2": 5}
    assert not padded.terms["1"].u[:, 10:].any()
    assert not padded.terms["1"].v[:, 10:].any()
    assert padded.terms["1"].multipliers[10:].eq(1).all()
    back = cut(padded.returned(padded.trained()), shard)
    torch.testing.assert_close(back.trained(), shard.trained(), rtol=0, atol=0)
    assert back.terms["1"].indices is shard.terms["1"].indices


@pytest.mark.parametrize("optimizer", [{"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, ADAMW])
def test_padded_terms_stay_zero(optimizer, monkeypatch):
    monkeypatch.setitem(PADDED, "cpu", 8)
    job = job_of("resnet", optimizer=optimizer)
    engine = LanesEngine(job)
    list(engine.train(make_plan(job), 0, LR))
    for lanes in engine._lanes.values():
        for layer in (layer for lane in lanes for layer in lane._model.modules() if hasattr(layer, "multipliers")):
            zero = ~layer.u.any(0)
            assert (~layer.v.any(0)).equal(zero)
    assert zero.any()


def test_clients_unlike_the_others_train_as_in_sequential(recorder, caplog):
    """One fails, one has no samples, one samples of another type, for which there is no memory, two other rates."""
    job = job_of("batch_norm", epochs=4)
    wrong, floats, none = (job.clients[client] for client in (2, 3, 5))
    unlike = {2: Split(wrong.inputs, wrong.targets + 100), 3: Split(floats.inputs / 2, floats.targets), 5: empty(none)}
    job = replace(job, clients=dict(job.clients) | unlike, lr_scales={1: 0.5, 4: 2.0})
    engine = assert_as_sequential(job, num_lanes=1, **ROUNDED)
    replies = dict(engine.train(make_plan(job), 0, LR))
    assert {client for client, reply in replies.items() if reply.failure is not None} == {2, 5}
    assert "client 2 failed in round 0: IndexError: Target" in caplog.text
    assert engine._capturing.enabled
    assert recorder.replays > 20


class Replaced(Shrinking):
    """Puts another tensor in its place."""

    def forward(self, inputs):
        self.scale = self.scale * 0.9
        return self.scale * inputs


class Branched(nn.Module):
    """Reads a value to decide what to compute."""

    def forward(self, inputs):
        return inputs if bool(inputs.mean() > 0) else 2 * inputs


class Tossed(nn.Module):
    """Draws random numbers that no graph repeats."""

    def forward(self, inputs):
        return inputs * (0.5 + random.random())


def job_with(module):
    return replace(job_of("resnet", epochs=4), model=nn.Sequential(module, nn.Flatten(), nn.Linear(64, 5)))


def test_buffers_that_are_not_sent_begin_anew_for_each_client(recorder):
    assert_as_sequential(job_with(Shrinking()), planner_of("dense"), num_lanes=2, **ROUNDED)
    assert recorder.replays > 20


@pytest.mark.parametrize(
    ("module", "reason"),
    [(Replaced(), "puts other tensors"), (Branched(), "RuntimeError: aten._local_scalar_dense.default reads a value")],
)
def test_steps_that_cannot_be_captured_are_eager_and_one_line_says_so(module, reason, recorder, caplog):
    engine = assert_as_sequential(job_with(module), planner_of("dense"), num_lanes=2, **ROUNDED)
    assert not engine._capturing.enabled
    assert caplog.text.count("Steps are not captured as CUDA graphs") == 1
    assert reason in caplog.text


def test_steps_that_draw_from_python_are_eager(recorder, caplog):
    job = job_with(Tossed())
    list(LanesEngine(job).train(make_plan(job, "dense"), 0, LR))
    assert "the model draws random numbers on the CPU" in caplog.text
    assert recorder.replays == 0


def doubled(logits, targets, ignore_index):
    """A loss of the user's own."""
    return 2 * LOSSES["cross_entropy"](logits, targets, ignore_index)


@pytest.mark.parametrize(
    ("local", "reason"),
    [
        ({"loss": "doubled"}, "local.loss=doubled is not known"),
        ({"optimizer": {"name": "adagrad", "lr": 0.02}}, "the state of local.optimizer=adagrad does not start at zero"),
        ({"optimizer": {"name": "sgd", "lr": 0.02, "fused": False}}, "local.optimizer=sgd reads its state on the CPU"),
    ],
)
def test_losses_and_optimizers_that_cannot_be_captured_are_eager(local, reason, recorder, caplog, monkeypatch):
    monkeypatch.setitem(LOSSES, "doubled", doubled)
    job = job_of("batch_norm", **local)
    plan = make_plan(job)
    assert_equal(list(SequentialEngine(job).train(plan, 0, LR)), list(LanesEngine(job).train(plan, 0, LR)))
    assert recorder.replays == 0
    assert caplog.text.count("Steps are not captured") == 1
    assert reason in caplog.text


def test_steps_are_captured_after_the_eager_ones_of_their_size(recorder):
    job = job_of("resnet", epochs=1)
    engine = LanesEngine(job)
    list(engine.train(make_plan(job), 0, LR))
    steps = {size: sum(length // 4 if size == 4 else length % 4 == size for length in SIZES) for size in (1, 2, 3, 4)}
    forms = len(engine._lanes)
    assert forms == len(set(RATIOS))
    assert 0 < recorder.replays <= sum(steps.values()) - WARM_UP * forms


def test_first_lane_tells_how_many_more_there_is_memory_for(monkeypatch):
    job = job_of("resnet", epochs=1)
    engine = LanesEngine(job)
    engine._is_cuda, engine._most = True, 100
    reserved = iter([1000, 1100, 2000, 2100])  # before and after the first client of each keep ratio: 100 for a lane
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(reserved))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (550 - 100 * trained_lanes(engine), 0))
    waves = []
    wave_of = engine._next_wave
    monkeypatch.setattr(engine, "_next_wave", lambda *given: waves.append(wave_of(*given)) or waves[-1])
    for round in (0, 1):
        plan = make_plan(job, round=round)
        assert_equal(list(SequentialEngine(job).train(plan, round, LR)), list(engine.train(plan, round, LR)))
    # One at a time at first, and the first lane makes way. Then 450 bytes have room, with half as much again, for two
    # new lanes in one wave, 250 for one more, and 150 for none.
    assert [list(wave) for wave in waves] == [[0], [1], [2, 3], [4, 5, 6], [0, 1, 2], [3, 4, 5, 6]]
    assert trained_lanes(engine) == 4


def trained_lanes(engine):
    """Return the number of lanes that have taken their memory."""
    return sum("_model" in vars(lane) for lanes in engine._lanes.values() for lane in lanes)
