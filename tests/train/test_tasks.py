"""Runs of several models over the same clients."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sharding import UserError
from tests.train.test_runs import Tampering, scaled
from train.checkpoint import MODEL_FILE, Checkpoint
from train.config import load_config
from train.local import evaluate
from train.run import follow, run
from train.tasks import ask, assemble_tasks, local_losses, run_tasks

TASKS = "{one: {data: {partition: iid}}, two: {seed: 5, keep_ratio: 1.0, model: {width: 8}}}"
TINY = [
    *(
        "rounds=3",
        "evaluate_every=1",
        "clients.count=8",
        "clients.per_round=8",
        "local.epochs=1",
        "local.batch_size=32",
    ),
    *("model.width=4", "model.groups=2", "model.blocks=[1]", "strategy=collective"),
    *("clients.sampler=mmfl", "clients.budget=4", f"tasks={TASKS}"),
]


def tiny(output, *overrides):
    return load_config("configs/quickstart.yaml", [*TINY, f"output={output}", *overrides])


def ignore(metrics):
    pass


def read(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


def test_each_models_average_is_evaluated_and_kept(tmp_path):
    config = tiny(tmp_path / "run")
    last = read(run(config, ignore))[-1]
    state, tasks = Checkpoint.read(config.directory / MODEL_FILE).state, assemble_tasks(config)
    for name, part in tasks.parts.items():
        assert int(state[f"average/{name}/n_averaged"]) == config.rounds
        part.model.load_state_dict({key: state[f"average/{name}/module.{key}"] for key in part.model.state_dict()})
        accuracy, loss = evaluate(part.model, part.dataset, part.dataset.test)
        assert (last[f"{name}/test_accuracy"], last[f"{name}/test_loss"]) == (accuracy, loss)


@pytest.mark.parametrize("signal", ["norm", "loss", "round_robin", "uniform", "full"])
def test_every_signal_trains_all_models(tmp_path, signal):
    lines = read(run(tiny(tmp_path / "run", f"clients.signal={signal}"), ignore))
    assert len(lines) == 3
    for line in lines:
        assert line["heard"] == line["one/heard"] + line["two/heard"] <= (16 if signal == "full" else 8)
        assert line["test_accuracy"] == (line["one/test_accuracy"] + line["two/test_accuracy"]) / 2
        assert line["failed"] == 0
    asked = [line["one/clients"] + line["two/clients"] for line in lines]
    heard = [line["heard"] for line in lines]
    assert asked == ([16] * 3 if signal in ("norm", "full") else heard)


def test_a_run_of_tasks_repeats_and_resumes(tmp_path):
    whole = read(run(tiny(tmp_path / "whole"), ignore))

    def pull_the_plug(metrics):
        if metrics["round"] == 1:
            raise KeyboardInterrupt

    config = tiny(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run(config, pull_the_plug)
    assert read(run(config, ignore, resume=True)) == whole


def test_tasks_differ_only_where_they_say():
    one, two = tiny("unused").task_configs().values()
    assert (one.data.partition, two.data.partition, two.data.name) == ("iid", "dirichlet", "digits")
    assert (one.model.options["width"], two.model.options["width"], two.model.options["groups"]) == (4, 8, 2)
    assert (one.seed, two.seed, two.keep_ratio, one.clients.sampler) == (0, 5, 1.0, "uniform")


def test_losses_are_those_of_each_clients_data():
    experiment = assemble_tasks(tiny("unused")).experiments["one"]
    losses = local_losses(experiment, [3, 5], batch_size=50)
    for client, loss in zip([3, 5], losses, strict=True):
        data = experiment.job.clients[client]
        logits = experiment.model.eval()(experiment.dataset.prepare(data.inputs))
        assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, data.targets).item(), rel=1e-5)


def test_a_client_that_fails_or_reports_nan_stops_nothing(caplog):
    tasks = assemble_tasks(tiny("unused", "rounds=1"))
    one = tasks.experiments["one"]
    clients = dict(one.job.clients)
    clients[2] = type(clients[2])(clients[2].inputs * float("nan"), clients[2].targets)
    clients[4] = None
    one.job = replace(one.job, clients=clients)
    signals, _ = ask(tasks, list(range(8)), 0)
    assert np.isnan(signals[2, 0])
    assert signals[4, 0] == 0
    assert signals[4, 1] > 0
    lines = []
    run_tasks(tasks, 0, lambda _, metrics: lines.append(metrics))
    assert lines[0]["failed"] == 1  # the one that could not train; the other is never drawn
    assert "[2] of the cohort reported no number in round 0" in caplog.text
    assert all(tensor.isfinite().all() for tensor in tasks.model.state_dict().values())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tasks={}"], "clients.sampler=mmfl and tasks=.* go together"),
        (["clients.sampler=uniform", "clients.budget=null"], "go together"),
        (["tasks={a.b: {}}"], "the task name 'a.b' must be a plain word"),
        (["tasks={a: {roundz: 3}}"], "unknown config key 'roundz'"),
        (["tasks={a: {strategy: none}}"], "unknown strategy 'none'"),
        (["clients.signal=los"], "clients.signal is 'los'"),
    ],
)
def test_mistakes_are_told_in_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as error:
        tiny("unused", *overrides)
    assert "\n" not in str(error.value)


def test_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for start in (assemble_tasks, follow):
        with pytest.raises(UserError, match="are trained by one process; start it without torchrun"):
            start(tiny("unused"))


def test_the_guards_hold_for_every_task():
    tasks = assemble_tasks(tiny("unused", "rounds=1", "clients.signal=round_robin", "aggregation.norm_bound=5"))
    one = tasks.experiments["one"]
    one.__dict__["engine"] = Tampering(one.engine, scaled(1e6))
    lines = []
    run_tasks(tasks, 0, lambda _, metrics: lines.append(metrics))
    assert lines[0]["one/failed"] == 1
    assert lines[0]["one/heard"] > 0
    assert "times the median" in next(iter(lines[0]["one/failures"].values()))
    assert max(float(tensor.abs().max()) for tensor in tasks.model.state_dict().values()) < 10
