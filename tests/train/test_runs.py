"""Whole runs on the embedded digits: what they write, that they learn, repeat and resume."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from sharding import COMPRESSIONS, STRATEGIES, ShardPlanner, UserError, shardable_layers
from sharding.rng import generator
from sharding.terms.strategies import num_terms
from tests.sharding.models import along
from tests.train.runs import RESNET, read, tiny, without_times
from train import load_model
from train.callbacks import Callback, EachRound
from train.callbacks.stopping import DivergedError, LostRounds
from train.engines import ENGINES, Engine
from train.engines.sequential import check_compiler
from train.experiment.assembly import assemble, assign_keep_ratios, find_engine
from train.experiment.evaluation import evaluate
from train.report.frame import read_runs
from train.rounds import run_rounds
from train.run import run
from train.rundir.checkpoint import Checkpoint, rounds_of
from train.rundir.directory import is_measured
from train.rundir.file_names import BEST_FILE, CHECKPOINT_FILE

REQUIRED = {
    *("round", "test_accuracy", "test_loss", "train_loss", "anme", "discrepancy"),
    *("bytes_down", "bytes_up", "seconds"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_run_with_any_strategy_trains(tmp_path, strategy):
    lines = read(run(tiny(tmp_path / "run", f"strategy={strategy}")))
    assert [line["round"] for line in lines] == [0, 1]
    for line in lines:
        assert line.keys() >= REQUIRED
        assert 0 <= line["test_accuracy"] <= 1
        assert line["num_failed"] == 0
        assert line["seconds"] >= line["seconds_train"] + line["seconds_plan"]


@pytest.mark.slow
def test_run_lowers_the_loss_and_is_better_than_chance(tmp_path):
    longer = [
        "rounds=8",
        "clients.count=10",
        "clients.per_round=5",
        "local.epochs=2",
        "local.optimizer.lr=0.05",
        "model.width=8",
    ]
    lines = read(run(tiny(tmp_path / "run", *longer, "keep_ratio=0.8", "data.partition=iid", shared=RESNET)))
    assert lines[-1]["train_loss"] < 0.5 * lines[0]["train_loss"]
    assert lines[-1]["test_accuracy"] > 0.5


@pytest.mark.parametrize(
    ("options", "reason", "logged"),
    [
        ([], "NaN or Inf", "failed in round 0"),
        (["clients.sampler=ocs", "clients.sampler.budget=3"], "reported a norm of nan", "no norm in round 0"),
    ],
)
def test_run_with_failing_clients_continues_and_reports_them(tmp_path, caplog, options, reason, logged):
    experiment = assemble(tiny(tmp_path / "run", "rounds=1", *options))
    poisoned, broken, _ = experiment.sampler.invite(0)
    data = experiment.job.clients[poisoned]
    bad = {poisoned: replace(data, inputs=data.inputs * float("nan")), broken: None}
    experiment.job = replace(experiment.job, clients={**experiment.job.clients, **bad})
    lines = []
    experiment.start()
    run_rounds(experiment, 0, [EachRound(lines.append)])
    assert (lines[0]["num_failed"], lines[0]["num_aggregated"]) == (2, 1)
    assert lines[0]["failures"].keys() == {str(poisoned), str(broken)}
    assert reason in lines[0]["failures"][str(poisoned)]
    assert "AttributeError" in lines[0]["failures"][str(broken)]
    assert logged in caplog.text
    assert all(tensor.isfinite().all() for tensor in experiment.model.state_dict().values())


@pytest.mark.parametrize("wire", COMPRESSIONS)
def test_run_bytes_equal_the_serialized_shards(tmp_path, wire):
    experiment = assemble(tiny(tmp_path / "run", "rounds=1", "keep_ratio=0.4", f"compression={wire}"))
    server = experiment.server
    plan = server.plan(dict.fromkeys(experiment.sampler.invite(0), 0.4), 0)
    expected = sum(len(shard.to_bytes()) for _, shard in plan.shards())
    dense = len(ShardPlanner("dense").plan(experiment.model, {"any": 1.0}).shard("any").to_bytes())
    lines = []
    experiment.start()
    run_rounds(experiment, 0, [EachRound(lines.append)])
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"], lines[0]["bytes_dense"]) == (expected, expected, dense)
    assert server.planner.compression == wire


@pytest.mark.parametrize(("strong", "ratio"), [(0.5, 0.2), (0.7, 0.4)])
def test_low_rank_init_has_the_terms_that_the_median_client_can_hold(strong, ratio, tmp_path):
    def weights(*overrides):
        mixed = f"keep_ratio={{0.2: {1 - strong}, 0.4: {strong}}}"
        experiment = assemble(tiny(tmp_path, mixed, *overrides, shared=RESNET))
        layers = shardable_layers(experiment.model, ())
        return {name: layer.weight.detach().flatten(1) for name, layer in layers.items()}

    built, low = weights("init=as_built"), weights("init=low_rank")
    ends = [next(iter(built)), list(built)[-1]]
    for name, before in built.items():
        magnitudes = torch.linalg.svdvals(low[name])
        if name in ends:
            assert torch.equal(low[name], before)
        else:
            n = num_terms(min(before.shape), ratio)
            torch.testing.assert_close(magnitudes[:n], torch.linalg.svdvals(before)[:n], rtol=1e-4, atol=1e-5)
            assert magnitudes[n:].max() < 1e-5
    for strategy in ("dense", "full"):
        whole = weights("init=low_rank", f"strategy={strategy}")
        assert all(torch.equal(whole[name], before) for name, before in built.items())


def test_assign_keep_ratios_has_the_given_shares():
    ratios = assign_keep_ratios({0.2: 0.6, 0.4: 0.4}, 20, seed=0)
    assert sorted(ratios.values()) == [0.2] * 12 + [0.4] * 8
    assert ratios == assign_keep_ratios({0.2: 0.6, 0.4: 0.4}, 20, seed=0)
    assert ratios != assign_keep_ratios({0.2: 0.6, 0.4: 0.4}, 20, seed=1)
    assert sorted(assign_keep_ratios({0.1: 1 / 3, 0.2: 2 / 3}, 5, 0).values()) == [0.1] * 2 + [0.2] * 3
    assert assign_keep_ratios(0.3, 3, 0) == {0: 0.3, 1: 0.3, 2: 0.3}


def test_several_threads_are_allowed_only_with_sequential():
    assert find_engine(tiny("unused", "engine=auto")) is ENGINES["auto"]
    assert find_engine(tiny("unused", "threads=2", "engine=sequential")) is ENGINES["sequential"]
    with pytest.raises(UserError, match=r"threads=2 .* engine=sequential; engine=auto"):
        find_engine(tiny("unused", "threads=2", "engine=auto"))


def test_cohorts_are_drawn_without_replacement_per_round():
    sampler = assemble(tiny("unused", "clients.per_round=20")).sampler
    cohorts = [sampler.invite(t) for t in range(3)]
    assert cohorts == [sorted(generator(0, "invite", t).choice(40, 20, replace=False).tolist()) for t in range(3)]


def test_run_with_averaging_evaluates_it_and_trains_the_same(tmp_path):
    last, models = tiny(tmp_path / "last", "result=last", "rounds=4", "checkpoint_every=1"), []

    def look(metrics):
        models.append(Checkpoint.read(last.directory / CHECKPOINT_FILE).state)

    run(last, [EachRound(look)])
    config = tiny(tmp_path / "average", "result=average", "rounds=4")
    lines = read(run(config))
    checkpoint, plain = Checkpoint.read(config.directory / CHECKPOINT_FILE), models[-1]
    assert all(torch.equal(checkpoint.state[name], tensor) for name, tensor in plain.items())
    weights = {name: tensor for name, tensor in plain.items() if "/" not in name}
    expected = {name: models[0][name] for name in weights}
    for t, model in enumerate(models, start=1):
        expected = {name: value + 9 / (t + 8) * (model[name] - value) for name, value in expected.items()}
    kept = {name: checkpoint.state[f".server/quickstart/average/module.{name}"] for name in weights}
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-6)
    experiment = assemble(config)
    experiment.model.load_state_dict(kept)
    dataset = experiment.dataset
    accuracy, loss = evaluate(experiment.model, dataset, dataset.test)
    assert (lines[-1]["test_accuracy"], lines[-1]["test_loss"]) == (accuracy, loss)
    assert [line["train_loss"] for line in lines] == [line["train_loss"] for line in read(last.directory)]
    best = max(lines, key=lambda line: line["test_accuracy"])
    assert rounds_of(config.directory / BEST_FILE, "model") == best["round"] + 1
    for best_of_run, line in ((True, best), (False, lines[-1])):
        model = load_model(config.directory, best_of_run)
        assert not model.training
        assert evaluate(model, dataset, dataset.test)[0] == line["test_accuracy"]


def test_client_drawn_twice_counts_twice_in_simulated_time(tmp_path):
    options = [
        "clients.sampler.replacement=true",
        "network={bandwidth: 2, communicate: [1, 1], compute: 0}",
        "clients.count=3",
    ]
    lines = read(run(tiny(tmp_path, *options, "clients.per_round=3", "rounds=6")))
    assert {line["num_clients"] for line in lines} > {3}, "in some rounds a client is drawn twice"
    assert [line["simulated_seconds"] for line in lines] == pytest.approx([3 * 1 / 2] * 6)


@pytest.mark.parametrize("strategy", ["collective", "top_n"])
def test_sampler_cost_of_a_client_is_its_update_over_the_dense_model(tmp_path, strategy):
    options = ["clients.sampler=ocs_partial", "clients.sampler.budget=0.6", "keep_ratio={0.2: 0.5, 0.6: 0.5}"]
    experiment = assemble(tiny(tmp_path, *options, f"strategy={strategy}"))
    plan = experiment.server.plan(experiment.clients.keep_ratios, 0)
    costs = [shard.returned(shard.trained()).nbytes / experiment.dense_nbytes for _, shard in plan.shards()]
    np.testing.assert_allclose(experiment.sampler.population.costs, costs, rtol=1e-12)
    assert min(costs) > 0.2


def test_run_with_certain_uploads_equals_plain_averaging(tmp_path):
    plain = read(run(tiny(tmp_path / "plain")))
    certain = read(run(tiny(tmp_path / "ocs", "clients.sampler=ocs", "clients.sampler.budget=3")))
    for one, other in zip(plain, certain, strict=True):
        assert other["bytes_up"] == one["bytes_up"] + 3 * 4  # a norm each
        for key in ("test_accuracy", "test_loss", "train_loss"):
            assert other[key] == one[key]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "ocs")]
    assert models[0] == models[1]


class Tampering(Engine):
    """An engine whose clients send what `tamper` makes of their updates, as pairs."""

    def __init__(self, engine, tamper):
        self._engine, self._tamper = engine, tamper

    def train(self, plan, round, lr):
        yield from self._tamper(plan, list(self._engine.train(plan, round, lr)))

    def close(self):
        self._engine.close()


def tampered(tmp_path, tamper, *overrides):
    """The metrics and the experiment of a run in which `tamper` has the last word on what clients send."""
    experiment = assemble(tiny(tmp_path / "run", *overrides))
    experiment.start()
    experiment.engine = Tampering(experiment.engine, tamper)
    lines, lost = [], LostRounds(experiment.config.rounds)
    run_rounds(experiment, 0, [EachRound(lines.append), lost])
    lost.raise_if_diverged()
    return lines, experiment


def first(change):
    """Change what the first client of the round sends."""
    return lambda plan, pairs: [*change(plan, *pairs[0]), *pairs[1:]]


TAMPERINGS = {
    "missing": (first(lambda plan, client, update: []), "nothing returned"),
    "another's": (
        lambda plan, pairs: [(pairs[0][0], pairs[1][1]), *pairs[1:]],
        r"has shape|indices are not those of the plan",
    ),
}


@pytest.mark.parametrize(
    "sampler", [[], ["clients.sampler=ocs", "clients.sampler.budget=3"], ["clients.sampler=statistical"]], ids=str
)
@pytest.mark.parametrize(("tamper", "reason"), TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_run_with_an_invalid_update_continues_and_rejects_it(tmp_path, tamper, reason, sampler):
    draws = ["keep_ratio=0.5", "strategy=unbiased", "init=as_built"]  # not the same terms for everybody
    lines, experiment = tampered(tmp_path, tamper, "rounds=1", *draws, *sampler)
    for line in lines:
        assert line["num_failed"] >= 1
        assert any(re.search(reason, message) for message in line["failures"].values())
        assert line["num_aggregated"] == line["num_clients"] - line["num_failed"]
    assert all(tensor.isfinite().all() for tensor in experiment.model.state_dict().values())


def test_run_with_duplicate_or_unknown_updates_counts_each_once(tmp_path, caplog):
    plain, _ = tampered(tmp_path, lambda plan, pairs: pairs)
    twice, _ = tampered(tmp_path, lambda plan, pairs: [*pairs, *pairs, (999, pairs[0][1])])
    assert without_times(twice) == without_times(plain)
    assert "update from client 999" in caplog.text


def scaled(factor):
    """Every first client's update, `factor` times as large."""

    def change(plan, client, reply):
        return [(client, replace(reply, update=along(plan.shard(client), reply.update, factor)))]

    return first(change)


def test_rounds_that_overflow_are_lost_and_end_the_run(tmp_path):
    experiment, lines, models, lost = assemble(tiny(tmp_path, "rounds=20")), [], [], LostRounds(20)
    experiment.start()
    experiment.engine = Tampering(experiment.engine, lambda plan, pairs: scaled(1e38)(plan, pairs))

    def record(metrics):
        lines.append(metrics)
        models.append([tensor.clone() for tensor in experiment.model.state_dict().values()])

    run_rounds(experiment, 0, [EachRound(record), lost])
    with pytest.raises(DivergedError, match=r"could be used in 5 rounds in a row: .* lower the learning rate"):
        lost.raise_if_diverged()
    assert len(lines) == 5
    for line in lines:
        assert (line["num_aggregated"], line["num_failed"]) == (0, 3)
    for model in models[1:]:
        assert all(torch.equal(one, other) for one, other in zip(models[0], model, strict=True))


def test_run_of_lost_rounds_raises_and_names_the_reason(tmp_path):
    with pytest.raises(
        DivergedError, match="in 2 rounds in a row: most failed with 'nothing returned'; metrics"
    ) as lost:
        tampered(tmp_path, lambda plan, pairs: [], "rounds=2")
    assert "learning rate" not in str(lost.value)


@pytest.mark.slow  # torch's compiler is imported
def test_compile_without_a_compiler_ends_a_run_before_it_begins(tmp_path, monkeypatch):
    inductor = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(inductor.cpp, "cxx", ("/nonexistent/g++",))
    check_compiler.cache_clear()
    config = tiny(tmp_path / "run", "device=cpu", "local.compile=true")
    with pytest.raises(UserError, match=r"local\.compile=true needs .*: install it, or set local\.compile=false"):
        run(config)
    assert not config.directory.exists()


@pytest.mark.parametrize(("rounds", "after"), [(2, 2), (8, 6)])
def test_diverged_run_is_unfinished_and_raises_when_resumed(tmp_path, rounds, after):
    config = tiny(tmp_path / "run", "local.optimizer.lr=1e30", f"rounds={rounds}")
    for resume in (False, True):
        with pytest.raises(DivergedError):
            run(config, resume=resume)
    assert len(read(config.directory)) == after
    assert not is_measured(config)
    assert not read_runs([config.directory])[0].results.is_finished.any()


def test_lost_last_round_counts_before_the_run_ends(tmp_path):
    experiment = assemble(tiny(tmp_path / "run"))
    lost = LostRounds(2)
    experiment.start()
    experiment.engine = Tampering(experiment.engine, lambda plan, pairs: [])

    class End(Callback):
        def after_round(self, metrics, plan):
            return metrics.round == 1

    run_rounds(experiment, 0, [End(), lost])
    with pytest.raises(DivergedError):
        lost.raise_if_diverged()


def test_run_with_evaluate_training_changes_nothing(tmp_path):
    config = tiny(tmp_path / "seen", "result=last", "evaluate_training=true", "evaluate_every=2")
    first, last = read(run(config))
    assert "train_set_loss" not in first
    experiment = assemble(config)
    Checkpoint.read(config.directory / CHECKPOINT_FILE).restore(experiment.model)
    assert sum(experiment.clients.num_samples.values()) == len(experiment.clients.data.all())
    expected = evaluate(experiment.model, experiment.dataset, experiment.clients.data.all())
    assert (last.pop("train_set_accuracy"), last.pop("train_set_loss")) == expected
    plain = read(run(tiny(tmp_path / "plain", "result=last", "evaluate_every=2")))
    assert without_times([first, last]) == without_times(plain)


def test_custom_callbacks_are_closed_with_the_outcome(tmp_path):
    class Closed(Callback):
        def __init__(self, stops):
            self.stops, self.failed = stops, None

        def after_round(self, metrics, plan):
            if self.stops:
                raise ZeroDivisionError

        def close(self, failed=False):
            self.failed = failed

    run(tiny(tmp_path / "whole"), [sound := Closed(False)])
    with pytest.raises(ZeroDivisionError):
        run(tiny(tmp_path / "broken"), [broken := Closed(True)])
    assert (sound.failed, broken.failed) == (False, True)


def test_evaluation_that_is_not_finite_logs_a_warning(tmp_path, caplog):
    experiment = assemble(tiny(tmp_path / "run"))
    with torch.no_grad():
        next(experiment.model.parameters()).fill_(torch.nan)
    dataset = experiment.dataset
    evaluate(experiment.model, dataset, dataset.test)
    assert "loss on digits is nan: lower local.optimizer.lr or server_optimizer.lr" in caplog.text
