"""A run's directory has one writer, and keeps nothing of a run that came to nothing."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path
from threading import Barrier, Event

import pytest

from sharding import UserError
from train.config.yaml_text import dump_yaml
from train.report.frame import read_runs
from train.run import run
from train.rundir.directory import check_directory, lock, open_directory, plain
from train.rundir.file_names import CHECKPOINT_FILE, CONFIG_FILE, LOCK_FILE, METRICS_FILE


def test_run_directory_with_two_threads_has_one_writer(config):
    entered, both, configs = Event(), Barrier(2), [config("seed=0"), config("seed=1")]

    def enter(which):
        with open_directory(configs[which], resume=False):
            entered.set()
            both.wait(10)

    def refused():
        with pytest.raises(UserError, match="another run writes to"):
            enter(1)
        both.wait(10)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(enter, 0)
        assert entered.wait(10)
        second = threads.submit(refused)
        first.result(), second.result()


OF_TASKS = ["local.schedule=constant", "clients.sampler=mmfl", "clients.sampler.budget=2"]


def leave(config):
    """Leave what a run of this configuration was started with."""
    config.directory.mkdir()
    (config.directory / CONFIG_FILE).write_text(dump_yaml(plain(config)))


def test_check_directory_compares_values_and_the_order_of_clients(config):
    tasks = "tasks={{one: {{local: {{clip: {}}}}}, two: {{}}}}"
    leave(config(*OF_TASKS, tasks.format(10)))
    check_directory(config(*OF_TASKS, tasks.format("10.0")), resume=True)
    for other in (tasks.format(11), "tasks={two: {}, one: {local: {clip: 10}}}"):
        with pytest.raises(UserError, match="holds a run with tasks="):
            check_directory(config(*OF_TASKS, other), resume=True)


def test_check_directory_refuses_more_rounds_where_the_schedule_of_a_task_depends_on_their_number(config):
    words = [*OF_TASKS, "tasks={one: {}, two: {local: {schedule: cosine}}}"]
    leave(config(*words))
    with pytest.raises(UserError, match="rounds=2, not 3: the schedule cosine depends on the total"):
        check_directory(config(*words, "rounds=3"), resume=True)


def test_worker_that_outlives_the_run_does_not_keep_the_lock(tmp_path):
    (listen, tell), (ready, there) = os.pipe(), os.pipe()
    with lock(tmp_path / LOCK_FILE):
        child = os.fork()
        if child == 0:
            os.write(there, b".")
            os.read(listen, 1)  # lives until it is told
            os._exit(0)
        os.read(ready, 1)
    with lock(tmp_path / LOCK_FILE):
        os.write(tell, b".")
    os.waitpid(child, 0)


@pytest.mark.parametrize("end", [UserError("no"), RuntimeError("no"), KeyboardInterrupt])
def test_run_that_ends_before_the_first_round_leaves_no_folder(config, end, tmp_path, monkeypatch):
    def train(*args):
        raise end

    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("train.run.run_rounds", train)
    for folder in ("new/run", "empty"):
        with pytest.raises(type(end) if isinstance(end, Exception) else end):
            run(config(f"output={tmp_path / folder}"))
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [LOCK_FILE]


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as server, chdir(path.parent):  # a socket's path is short
        server.bind(path.name)


def device(path):
    path.symlink_to(os.devnull)


@pytest.mark.parametrize("name", [LOCK_FILE, METRICS_FILE, CHECKPOINT_FILE, "summary.md"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, unix_socket, device])
def test_run_with_a_non_file_in_place_of_a_file_is_refused(config, name, make):
    settings = config()
    settings.directory.mkdir()
    make(settings.directory / name)
    for resume in (False, True):
        with pytest.raises(UserError, match=f"{name} is no regular file; move it"):
            run(settings, resume=resume)
    assert f"{name} is no regular file; move it" in read_runs([settings.directory])[1][0]


def test_lock_that_is_no_regular_file_raises(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(UserError, match=r"\.lock is no regular file; move it"), lock(tmp_path / LOCK_FILE):
        pass
