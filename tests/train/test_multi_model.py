"""Runs of several models over the same clients."""

from dataclasses import replace
from functools import partial
from itertools import cycle
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sharding import UserError
from tests.train import runs
from tests.train.runs import read
from train import load_model
from train.callbacks import EachRound
from train.callbacks.stopping import DivergedError
from train.config.schema import check_config
from train.engines.two_stage import report
from train.experiment.evaluation import evaluate
from train.report.page import write_page
from train.run import run
from train.rundir.checkpoint import Checkpoint
from train.rundir.directory import plain
from train.rundir.file_names import CHECKPOINT_FILE
from train.rundir.records import read_layers
from train.variants.multi_model import assemble_models, local_losses, run_multi_model

TASKS = "{one: {data: {partition: iid}}, two: {seed: 5, keep_ratio: 0.5, model: {hidden: [16, 32, 16]}}}"
SMALL = ["clients.count=8", "clients.per_round=8", "model={name: mlp, hidden: [16, 64, 16]}", "local.batch_size=32"]
OPTIONS = [
    *("rounds=3", "evaluate_every=1", "local.epochs=1", *SMALL),
    *("clients.sampler=mmfl", "clients.sampler.budget=4", f"tasks={TASKS}"),
]
tiny = partial(runs.tiny, shared=OPTIONS)


def start(models):
    for one in models.parts.values():
        one.start()


def test_run_of_tasks_evaluates_and_saves_each_average(tmp_path):
    config = tiny(tmp_path / "run")
    last = read(run(config))[-1]
    state, tasks = Checkpoint.read(config.directory / CHECKPOINT_FILE).state, assemble_models(config)
    models = load_model(config.directory)
    for name, part in tasks.parts.items():
        assert int(state[f".server/{name}/average/n_averaged"]) == config.rounds
        accuracy, loss = evaluate(models[name], part.dataset, part.dataset.test)
        assert (last[f"{name}/test_accuracy"], last[f"{name}/test_loss"]) == (accuracy, loss)


@pytest.mark.usefixtures("undrawn")
def test_run_of_tasks_reports_layers_and_accuracy_of_each_model(tmp_path):
    directory = run(tiny(tmp_path / "run", "rounds=1", "strategy=top_n"))
    (layers,) = read_layers(directory).values()
    assert list(layers) == ["one/3", "one/5", "two/3", "two/5"]
    write_page([directory], tmp_path, "x")
    text = (tmp_path / "report.html").read_text()
    for named in (*layers, "Test accuracy of one by round.", "Test accuracy of two by round."):
        assert named in text


@pytest.mark.parametrize("signal", ["norm", "loss", "round_robin", "uniform", "full"])
def test_run_of_tasks_with_any_signal_trains_all_models(tmp_path, signal):
    lines = read(run(tiny(tmp_path / "run", f"clients.sampler.signal={signal}", "rounds=2")))
    assert len(lines) == 2
    for line in lines:
        assert (
            line["num_aggregated"]
            == line["one/num_aggregated"] + line["two/num_aggregated"]
            <= (16 if signal == "full" else 8)
        )
        assert line["test_accuracy"] == (line["one/test_accuracy"] + line["two/test_accuracy"]) / 2
        assert line["num_failed"] == 0
    asked = [line["one/num_clients"] + line["two/num_clients"] for line in lines]
    aggregated = [line["num_aggregated"] for line in lines]
    assert asked == ([16] * 2 if signal in ("norm", "full") else aggregated)


def test_task_with_another_server_optimizer_has_its_options():
    config = tiny("unused", "tasks={a: {server_optimizer: momentum}, b: {}}", "server_optimizer.momentum=0.7")
    for whole in (config, check_config(plain(config))):
        rates = {task.name: task.server_optimizer.options for task in whole.models()}
        assert rates == {"a": {"lr": 1.0, "momentum": 0.9}, "b": {"lr": 0.4, "momentum": 0.7}}


def test_engine_that_cannot_start_closes_the_others(tmp_path):
    config = tiny(tmp_path / "run")
    models = assemble_models(config)
    one, two = models.parts.values()
    one.make_engine = Mock(return_value=(engine := Mock()))
    two.make_engine = Mock(side_effect=UserError("no such engine"))
    with pytest.raises(UserError, match="no such engine"):
        run(config, build=lambda config: models)
    engine.close.assert_called_once_with()


def test_local_losses_equal_those_of_each_client_in_batches_of_few_logits(monkeypatch):
    task, sizes = assemble_models(tiny("unused")).parts["one"], []
    monkeypatch.setattr("train.experiment.evaluation.MOST_LOGITS", 7 * task.dataset.num_classes)
    with task.server.model.register_forward_pre_hook(lambda model, inputs: sizes.append(len(inputs[0]))):
        losses = local_losses(task, [3, 5], batch_size=50)
    assert max(sizes) == 7
    for client, loss in zip([3, 5], losses, strict=True):
        data = task.job.clients[client]
        logits = task.server.model.eval()(task.dataset.prepare(data.inputs))
        assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, data.targets).item(), rel=1e-5)


def test_run_of_tasks_with_failed_or_nan_clients_continues(caplog):
    tasks = assemble_models(tiny("unused", "rounds=1"))
    one = tasks.parts["one"]
    clients = dict(one.job.clients)
    clients[2] = type(clients[2])(clients[2].inputs * float("nan"), clients[2].targets)
    clients[4] = None
    one.job = replace(one.job, clients=clients)
    start(tasks)
    norms = {name: report(task.engine, task.plan(range(8), 0), 0, 0.1).norms for name, task in tasks.parts.items()}
    assert np.isnan(norms["one"][2])
    assert 4 not in norms["one"]
    assert norms["two"][4] > 0
    lines = []
    run_multi_model(tasks, 0, [EachRound(lines.append)])
    assert lines[0]["failures"].keys() == {"one/2", "one/4"}
    assert lines[0]["failures"]["one/2"] == "reported a norm of nan"
    assert lines[0]["failed_by_kind"] == {"not finite": 1, "failed": 1}
    assert "clients [2]: no norm in round 0" in caplog.text
    assert all(tensor.isfinite().all() for tensor in tasks.model.state_dict().values())


def test_run_of_tasks_that_all_diverge_ends(tmp_path):
    with pytest.raises(DivergedError, match="in 2 rounds in a row"):
        run(tiny(tmp_path, "rounds=2", "local.optimizer.lr=1e30"))


def test_task_that_diverges_leaves_the_others_training(tmp_path):
    tasks = "tasks={one: {local: {optimizer: {lr: 1e30}}}, two: {}}"
    (line,) = read(run(tiny(tmp_path, "rounds=1", tasks)))
    assert set(line["failures"]) == {f"one/{client}" for client in range(8)}
    assert (line["one/num_aggregated"], line["one/num_failed"]) == (0, 8)
    assert line["two/num_aggregated"] > 0


def test_client_without_a_loss_is_not_assigned_the_task(monkeypatch):
    tasks = assemble_models(tiny("unused", "rounds=1", "clients.sampler.signal=loss"))
    losses = cycle([np.array([np.nan, *np.ones(7)]), np.zeros(8)])  # of one and of two
    monkeypatch.setattr("train.variants.multi_model.local_losses", lambda one, cohort: next(losses))
    cohorts = [tasks.invite(t) for t in range(10)]
    assert {client for cohort in cohorts for client in cohort["one"]} == set(range(1, 8))
    assert not any(cohort["two"] for cohort in cohorts)
