"""Real processes: the same bits for any number of them, and no failure that goes unnoticed."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch

from sharding import Plan
from tests.train.engines.jobs import make_job, make_plan, stack_always, tensors, with_bad_clients
from tests.train.test_cli import REPOSITORY, wait_until
from tests.train.test_runs import TINY, read, without_times
from train.config import load_config
from train.engines import post as post_module
from train.engines import processes as processes_module
from train.engines import workers as workers_module
from train.engines.letters import Parcel
from train.engines.post import Inbox, WorkerError
from train.engines.processes import ProcessesEngine, deal
from train.engines.stacked import StackedEngine
from train.run import run

LR = 0.05


@pytest.fixture
def engine_of():
    """Makes engines, and closes them."""
    engines = []

    def make(job, num_workers):
        engines.append(ProcessesEngine(job, num_workers))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("num_workers", "start"), [(1, "fork"), (2, "fork"), (3, "fork"), (2, "spawn")])
def test_any_number_of_workers_gives_the_bits_of_stacked(num_workers, start, engine_of, monkeypatch):
    stack_always(monkeypatch)
    monkeypatch.setattr(workers_module, "start_method", lambda: start)
    job = with_bad_clients(make_job("cct"))
    engine = engine_of(job, num_workers)
    for round in (0, 1):
        plan = make_plan(job, round=round)
        expected, updates = list(StackedEngine(job).train(plan, round, LR)), list(engine.train(plan, round, LR))
        assert [client for client, _ in updates] == [client for client, _ in expected]
        for (_, mine), (_, theirs) in zip(expected, updates, strict=True):
            assert mine.failure == theirs.failure
            if mine.shard is not None:
                assert torch.equal(mine.loss, theirs.loss) or mine.loss.isnan()
                values = dict(tensors(theirs.shard))
                for name, tensor in tensors(mine.shard):
                    assert torch.equal(tensor, values[name]) or bool(tensor.isnan().any())


def test_a_worker_that_dies_is_told_and_nobody_waits_for_it(engine_of):
    job = make_job()
    engine, plan = engine_of(job, 2), make_plan(job)
    list(engine.train(plan, 0, LR))
    os.kill(active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 1 died"):
        list(engine.train(plan, 1, LR))


def test_a_worker_that_dies_before_it_is_needed_is_told(engine_of):
    job = make_job()
    engine = engine_of(job, 2)
    os.kill(active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 1 died"):
        list(engine.train(make_plan(job), 0, LR))


def test_a_worker_does_not_write_through_what_it_inherited(tmp_path, engine_of, monkeypatch, capfd):
    class Console(logging.Handler):
        def emit(self, record):
            (tmp_path / str(os.getpid())).touch()

    handler = Console()
    logging.getLogger().addHandler(handler)
    try:
        job = with_bad_clients(make_job())
        engine = engine_of(job, 2)
        monkeypatch.setattr(processes_module, "deal", lambda loads, *args: [1] * len(loads))
        failures = [update.failure for _, update in engine.train(make_plan(job), 0, LR)]
    finally:
        logging.getLogger().removeHandler(handler)
    assert any(failures)
    assert [path.name for path in tmp_path.iterdir() if path.name != str(os.getpid())] == []
    assert "failed in round 0" in capfd.readouterr().err


def test_a_workers_own_error_comes_home(engine_of):
    engine = engine_of(make_job(), 2)
    engine._lines[0].send("no order at all")
    with pytest.raises(WorkerError, match=r"(?s)worker 1 failed:.*AttributeError: 'str' object"):
        Inbox(engine._lines[0], 1).get()


def test_a_shard_that_cannot_be_read_is_its_clients_failure(engine_of):
    engine, plan = engine_of(make_job(), 1), make_plan(make_job())
    (_, broken), (client, whole) = engine._open(
        Parcel([(0, b"garbage", 1.0, None), (1, plan[1].to_bytes(), 1.0, None)])
    )
    assert broken.shard is None
    assert "no shard" in broken.failure
    assert (client, whole.failure, whole.shard.plan) == (1, None, plan[1].plan)


def test_workers_are_forked_unless_a_gpu_may_be_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert workers_module.start_method() == ("fork" if sys.platform == "linux" else "spawn")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert workers_module.start_method() == "spawn"


def test_rank_0_trains_ahead_while_it_waits_but_only_so_far(engine_of, monkeypatch):
    job = make_job()
    engine, plan = engine_of(job, 2), make_plan(job)
    trained, train_bunch = [], engine.stacked.train_bunch

    def noted(bunch, *args):
        trained.append(bunch)
        return train_bunch(bunch, *args)

    monkeypatch.setattr(engine.stacked, "train_bunch", noted)
    monkeypatch.setattr(processes_module, "deal", lambda loads, *args: [1] + [0] * (len(loads) - 1))
    monkeypatch.setattr(Inbox, "empty", lambda inbox: True)
    updates = engine.train(plan, 0, LR)
    assert next(updates)[0] == engine.stacked.bunches(plan)[0].clients[0]
    assert trained == engine.stacked.bunches(plan)[1 : 1 + workers_module.AHEAD]
    assert len(list(updates)) == len(plan) - 1


def test_a_round_without_clients_has_no_updates(engine_of):
    assert list(engine_of(make_job(), 2).train(Plan({}, {}, {}, {}, {}), 0, LR)) == []


def test_the_longest_are_dealt_first_each_to_who_has_the_least():
    assert deal([3, 1, 4, 1, 5], 2) == [1, 0, 1, 0, 0]
    assert deal([2, 2], 3) == [0, 1]
    assert deal([], 2) == []
    assert deal([1, 1, 1, 1], 2, handicap=2.0) == [1, 1, 0, 1]


def overrides(output, *more, rounds=2):
    return ["configs/quickstart.yaml", f"output={output}", f"rounds={rounds}", *TINY[1:], *more]


def test_a_run_gives_the_same_on_every_choice_of_processes(tmp_path):
    lines = {}
    for engine in ("auto", "processes"):
        config = load_config(overrides("")[0], overrides(tmp_path / engine, f"engine={engine}")[1:])
        lines[engine] = without_times(read(run(config, lambda metrics: None)))
    out = tmp_path / "torchrun"
    done = torchrun(overrides(out))
    assert done.returncode == 0, done.stderr
    lines["torchrun"] = without_times(read(out))
    assert lines["auto"] == lines["processes"] == lines["torchrun"]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in lines]
    assert models[0] == models[1] == models[2]
    finished = torchrun([*overrides(out), "--resume"])
    assert finished.returncode == 0, finished.stderr


def torchrun(arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "train", "run", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}  # torchrun would say 1, which must not be what holds
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def left_behind(pid):
    places = map(Path, ("/dev/shm", gettempdir()))
    return [folder for place in places for folder in place.glob(f"spectral-sharding-{pid}-*")]


@pytest.mark.parametrize(
    "end",
    [
        lambda process: process.kill(),
        lambda process: os.killpg(process.pid, signal.SIGTERM),  # as a cluster's scheduler does
    ],
    ids=["killed alone", "all told to end"],
)
def test_workers_end_with_the_run_that_is_killed(tmp_path, end):
    command = [sys.executable, "-m", "train", "run", *overrides(tmp_path, "engine=processes", rounds=100000)]
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    workers = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
    assert left_behind(process.pid)
    end(process)
    process.wait()
    assert workers
    wait_until(lambda: not any(os.path.exists(f"/proc/{worker}") for worker in workers))
    assert left_behind(process.pid) == []


def test_an_interrupt_is_one_line_and_ends_the_workers(tmp_path):
    heeding = ["env", "--default-signal=INT"]  # what a shell starts in the background ignores Ctrl-C
    command = [
        *heeding,
        sys.executable,
        "-m",
        "train",
        "run",
        *overrides(tmp_path, "engine=processes", rounds=100000),
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told == "interrupted; the same command with --resume goes on from the last checkpoint\n"
    assert left_behind(process.pid) == []


def test_a_worker_that_keeps_rank_0_waiting_is_told_of(monkeypatch, caplog):
    """As one that was stopped would: it is waited for, since it may go on, but not without a word."""
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(post_module, "PATIENCE", 0.01)
    warn = post_module.log.warning

    def answer_after_two(*words):
        warn(*words)
        if len(caplog.records) == 2:
            theirs.send("at last")

    monkeypatch.setattr(post_module.log, "warning", answer_after_two)
    assert post_module.Pipe(3, ours).receive() == "at last"
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "worker 3 has sent nothing for 0.01 s: it trains long, or was stopped"
    assert "0.02 s" in told[1]
