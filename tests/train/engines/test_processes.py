"""Real processes: the bits of `sequential` for any number of them, and no failure that goes unnoticed."""

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import active_children
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sharding import Shard, ShardPlanner, UserError, client_model
from tests.train.engines.jobs import MODELS, RATIOS, Shrinking, assert_equal, make_job, make_plan, with_bad_clients
from tests.train.runs import QUICKSTART, REPOSITORY, assert_same, read, tiny, wait_until
from train import engines as engines_module
from train.engines import ENGINES, ProcessesEngine, processes
from train.engines.engine import Reply
from train.engines.local_training import train_locally
from train.engines.memory_format import keep_memory_format
from train.engines.sequential import SequentialEngine
from train.engines.workers import train_client
from train.experiment.assembly import assemble
from train.run import run, threads
from train.rundir.checkpoint import Checkpoint
from train.rundir.file_names import CHECKPOINT_FILE
from train.utils.errors import RunError

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


@pytest.mark.parametrize(("device", "named"), [("cpu", False), ("cpu:0", True)])
def test_job_of_a_device_with_an_index_has_only_that_device(tmp_path, device, named):
    assert assemble(tiny(tmp_path, f"device={device}")).job.one_device is named


@pytest.mark.parametrize(("one_device", "used"), [(True, ["cuda:1"]), (False, ["cuda:0", "cuda:1", "cuda:2"])])
def test_processes_use_all_gpus_or_the_one_of_the_job(monkeypatch, one_device, used):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    job = SimpleNamespace(device=torch.device("cuda:1"), one_device=one_device)
    assert [processes.device_of(job, index) for index in range(processes.count_devices(job))] == used


POOLS = [(1, "forkserver", 4), (2, "forkserver", 1)]
MORE = [(1, "forkserver", 1), (2, "forkserver", 4), (2, "spawn", 1), (2, "spawn", 4)]


@pytest.mark.parametrize(
    ("num_workers", "start", "ahead"), [*POOLS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_processes_with_any_number_of_workers_equal_sequential(num_workers, start, ahead, engine_of, monkeypatch):
    monkeypatch.setattr(processes, "start_method", lambda: start)
    monkeypatch.setattr(processes, "AHEAD", ahead)
    job = with_bad_clients(make_job("cct"))
    engine, nobody = engine_of(job, num_workers), ShardPlanner("top_n").plan(job.model, {})
    for round, plan in enumerate((make_plan(job), nobody, make_plan(job, round=2))):
        expected = list(SequentialEngine(job).train(plan, round, LR))
        assert_equal(expected, list(engine.train(plan, round, LR)))


FROZEN = [("resnet", "top_n"), ("cct", "unbiased"), ("gpt", "unbiased")]
MORE_FROZEN = [("resnet", "unbiased"), *((kind, "dense") for kind in MODELS)]


@pytest.mark.parametrize(
    ("kind", "strategy"), [*FROZEN, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_FROZEN)]
)
def test_processes_with_frozen_layers_and_tails_equal_sequential(kind, strategy, engine_of):
    job = make_job(kind)
    for index, parameter in enumerate(job.model.parameters()):
        parameter.requires_grad_(index % 5 not in (0, 1))
    job = replace(job, frozen=ShardPlanner(strategy).frozen(job.model))
    plan = make_plan(job, strategy)
    tails = [ratio == 0.3 and strategy == "top_n" for ratio in RATIOS]
    assert [bool(shard.tail) for _, shard in plan.shards()] == tails
    assert_equal(list(SequentialEngine(job).train(plan, 0, LR)), list(engine_of(job, 1).train(plan, 0, LR)))


@pytest.mark.parametrize("kind", MODELS)
def test_engine_trains_as_a_device_that_dequantizes_its_tail_in_each_step(kind):
    job = make_job(kind)
    plan = make_plan(job, "top_n")
    client, shard = next(plan.shards())
    assert {stored.dtype for stored in shard.tail.values()} == {torch.uint8}
    device = keep_memory_format(client_model(job.model, shard))
    loss = train_locally(device, job.clients[client], job.dataset, job.local, LR, shard.clip, (job.seed, 0, client))
    assert_equal([(client, Reply(shard.read_from(device), loss))], [next(SequentialEngine(job).train(plan, 0, LR))])


def test_sequential_client_does_not_see_what_an_earlier_one_left_in_unsent_buffers():
    job = replace(make_job(), model=nn.Sequential(Shrinking(), nn.Flatten(), nn.Linear(64, 5)))
    plan = make_plan(job, "dense")
    together = dict(SequentialEngine(job).train(plan, 0, LR))
    alone = SequentialEngine(job).train_client(1, plan.shard(1), 0, LR)
    assert torch.equal(together[1].loss, alone.loss)


def test_processes_with_a_dead_worker_raise_at_once(engine_of):
    job = make_job()
    engine, plan = engine_of(job, 2), make_plan(job)
    list(engine.train(plan, 0, LR))
    os.kill(active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"worker process died.*--resume"):
        list(engine.train(plan, 1, LR))


def test_close_during_a_round_ends_the_workers(engine_of):
    job = make_job()
    engine = ProcessesEngine(job, 2)
    next(engine.train(make_plan(job), 0, LR))
    assert len(active_children()) == 2
    engine.close()
    assert not active_children()


def test_start_of_processes_leaves_no_temporary_file_and_as_many_threads(engine_of, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with threads(2):
        engine_of(make_job(), 1)
        assert torch.get_num_threads() == 2
    assert list(tmp_path.glob("sharding-*")) == []


@pytest.mark.parametrize(
    ("device", "count", "one_device", "in_a_worker", "kind"),
    [
        ("cuda:0", 1, False, False, "LanesEngine"),
        ("cuda:0", 4, True, False, "LanesEngine"),
        ("cuda:0", 4, False, False, "ProcessesEngine"),
        ("cpu", 1, False, False, "SequentialEngine"),
        ("cpu", 2, False, True, "SequentialEngine"),
        ("cpu", 2, False, False, "ProcessesEngine"),
    ],
)
def test_auto_engine_depends_on_the_numbers_of_gpus_and_cores(
    device, count, one_device, in_a_worker, kind, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(processes, "num_cores", lambda: count)
    monkeypatch.setattr(engines_module, "parent_process", lambda: object() if in_a_worker else None)
    for name in ("LanesEngine", "ProcessesEngine", "SequentialEngine"):
        monkeypatch.setattr(engines_module, name, lambda job, name=name: name)
    assert ENGINES["auto"](SimpleNamespace(device=torch.device(device), one_device=one_device)) == kind


UNSENDABLE = {
    "lambda": lambda job: replace(job, dataset=replace(job.dataset, prepare=lambda batch: batch)),
    "Serialization of parametrized modules": lambda job: replace(job, model=weight_norm(nn.Linear(64, 5))),
}


@pytest.mark.parametrize("reason", UNSENDABLE)
def test_auto_engine_with_a_job_that_cannot_be_sent_falls_back_to_sequential(reason, monkeypatch, caplog):
    monkeypatch.setattr(processes, "num_cores", lambda: 2)
    job = UNSENDABLE[reason](make_job())
    with pytest.raises(UserError, match=rf"cannot be sent to other processes.*{reason}.*engine=sequential"):
        ProcessesEngine(job)
    assert type(ENGINES["auto"](job)) is SequentialEngine
    assert "Training in one process" in caplog.text


@contextmanager
def limited(kind, limit):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_auto_engine_with_too_few_open_files_falls_back_and_closes_what_it_opened(engine_of, monkeypatch, caplog):
    monkeypatch.setattr(processes, "num_cores", lambda: 8)
    job = make_job()
    engine_of(job, 1)  # starts the fork server, which stays
    before = open_files()
    with limited(resource.RLIMIT_NOFILE, before + 20):
        engine = ENGINES["auto"](job)
        assert isinstance(engine, SequentialEngine)
        assert len(list(engine.train(make_plan(job), 0, LR))) == len(job.clients)
    gc.collect()
    assert open_files() < before + 5  # Python itself leaves the pipes of a process that did not start
    assert "Too many open files" in caplog.text
    assert "engine=sequential" in caplog.text


def test_auto_engine_with_a_full_temporary_folder_falls_back_to_sequential(monkeypatch, caplog):
    monkeypatch.setattr(processes, "num_cores", lambda: 2)
    processes.context_of()  # else the fork server, which stays, could start with the limit
    with limited(resource.RLIMIT_FSIZE, 1000):
        engine = ENGINES["auto"](make_job())
    assert isinstance(engine, SequentialEngine)
    assert "File too large" in caplog.text
    assert "TMPDIR" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, "Read-only file system"), ImportError("lacks a functioning sem_open")]
)
def test_auto_engine_without_semaphores_falls_back_to_sequential(error, monkeypatch, caplog):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(processes, "num_cores", lambda: 2)
    monkeypatch.setattr(processes.context_of(), "Barrier", fail)
    assert type(ENGINES["auto"](make_job())) is SequentialEngine
    assert f"({error.args[-1]}): set engine=sequential" in caplog.text


def test_processes_with_hundreds_of_tensors_need_no_shared_memory(engine_of):
    job = make_job()
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64, bias=False) for _ in range(300)), nn.Linear(64, 5))
    job = replace(job, model=model, local=job.local.model_copy(update={"steps": 1}))
    plan = make_plan(job, "dense")
    assert_equal(list(SequentialEngine(job).train(plan, 0, LR)), list(engine_of(job, 1).train(plan, 0, LR)))
    tensors = [*model.parameters(), job.dataset.test.inputs, job.clients[0].inputs]
    assert not any(tensor.is_shared() for tensor in tensors)


@pytest.mark.slow
def test_script_without_a_main_guard_raises_with_the_reason(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.train.runs import tiny\nfrom train.run import run\n"
        f"run(tiny({str(tmp_path / 'run')!r}, 'engine=processes'))\n"
    )
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    assert ended.returncode == 1
    assert "if __name__ == '__main__'" in ended.stderr.splitlines()[-1]


def test_run_with_any_engine_has_the_same_bits(tmp_path):
    local = ENGINES.keys() - {"ray"}  # it needs a cluster
    runs = [run(tiny(tmp_path / engine, f"engine={engine}")) for engine in sorted(local)]
    for directory in runs[1:]:
        assert_same(directory, runs[0])


HEEDING = ["env", "--default-signal=INT,TERM,HUP"]  # what a shell starts in the background ignores Ctrl-C
SAID = "interrupted; the same command with --resume continues from the last checkpoint\n"
LONG = ["rounds=100000", "checkpoint_every=100000", "evaluate_every=1", "model={name: mlp, hidden: [16, 64, 16]}"]


@contextmanager
def endless(tmp_path, *words):
    """Start a command that trains and does not end, in a group of its own; yield it after its first round."""
    words = words or ("run", QUICKSTART, *LONG, "engine=processes", f"output={tmp_path}")
    command, how = [*HEEDING, sys.executable, "-m", "train", *words], {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **how) as process:
        try:
            wait_until(lambda: process.poll() or any(path.stat().st_size for path in tmp_path.rglob("metrics.jsonl")))
            yield process
            wait_until(lambda: not alive(process.pid))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def alive(group):
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True


COMPARED = ["compare", QUICKSTART, *LONG, "--strategies", "top_n,unbiased", "--jobs", "2"]
COMMANDS = pytest.mark.parametrize(
    "words", [[], pytest.param(COMPARED, marks=pytest.mark.slow)], ids=["run", "compare"]
)


@COMMANDS
def test_killed_command_ends_its_workers(tmp_path, words):
    with endless(tmp_path, *words, *([f"output={tmp_path}"] if words else [])) as process:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_run_without_its_fork_server_ends_at_once(tmp_path):
    with endless(tmp_path) as process:
        server = subprocess.check_output(["pgrep", "-P", str(process.pid), "-f", "forkserver"], text=True)
        os.kill(int(server), signal.SIGKILL)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "error: a worker process died" in told


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
@COMMANDS
def test_signal_to_all_processes_of_a_command_stops_it_after_the_round(tmp_path, words, number):
    """As Ctrl-C, a job scheduler, `timeout` and a closed terminal send it."""
    with endless(tmp_path, *words, *([f"output={tmp_path}"] if words else [])) as process:
        os.killpg(process.pid, number)
        _, told = process.communicate(timeout=60)
        assert (process.returncode, told) == (128 + number, SAID)
    for metrics in tmp_path.rglob("metrics.jsonl"):
        assert Checkpoint.read(metrics.parent / CHECKPOINT_FILE).rounds == len(read(metrics.parent))


def test_shard_that_does_not_fit_the_device_is_the_failure_of_its_client(monkeypatch):
    def run_out(shard, device):
        raise torch.OutOfMemoryError("out of memory")

    job = make_job()
    shard = make_plan(job).shard(0)
    monkeypatch.setattr(Shard, "to", run_out)
    update, loss, failure = train_client(SequentialEngine(job), 0, shard, replace(shard, terms={}), 0, LR)
    assert (update, loss, str(failure)) == (None, None, "OutOfMemoryError: out of memory")


def test_processes_after_a_round_that_was_left_equal_sequential(engine_of):
    job = make_job()
    engine, left, plan = engine_of(job, 1), make_plan(job, round=1), make_plan(job)
    expected = list(SequentialEngine(job).train(plan, 0, LR))
    next(engine.train(left, 1, LR))
    assert_equal(expected, list(engine.train(plan, 0, LR)))
