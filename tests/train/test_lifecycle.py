"""Nothing lost, nothing mixed: a run that is killed, told to stop, or finds its files spoiled or its disk full."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import active_children

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sharding import UserError, factorize
from sharding.client_sampling import StatisticalSampler
from sharding.layers.base import residual_layers
from tests.train.runs import (
    QUICKSTART,
    REPOSITORY,
    TINY,
    assert_same,
    count_writes,
    cut_off,
    in_a_process,
    read,
    tiny,
    wait_until,
)
from train import load_model
from train.callbacks import EachRound, saving
from train.cli.commands import main
from train.cli.sweep import grid_configs, sweep
from train.config.yaml_text import dump_yaml, read_yaml
from train.run import run
from train.rundir.checkpoint import Checkpoint, rounds_of
from train.rundir.directory import check_directory, is_finished, is_measured
from train.rundir.file_names import (
    BEST_FILE,
    CHECKPOINT_FILE,
    CLIENTS_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    MODEL_FILE,
    PREVIOUS_FILE,
)
from train.utils.errors import RunError
from train.utils.files import UNFINISHED
from train.utils.signals import Stopped

OPTIONS = ["rounds=4", "checkpoint_every=1", "clients.sampler=ocs", "clients.sampler.budget=1.5"]
OPTIONS += ["local.schedule=inverse"]  # it depends on the round, and not on their number


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    config = tiny(tmp_path_factory.mktemp("whole") / "run", *OPTIONS)
    run(config)
    return config.directory


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A run that died after its third round."""
    config = tiny(tmp_path_factory.mktemp("cut") / "run", *OPTIONS)
    cut_off(config, after=2)
    return config.directory


def continued(directory, tmp_path):
    """Return the configuration of a run that was as far as that directory."""
    config = tiny(tmp_path / "run", *OPTIONS)
    shutil.copytree(directory, config.directory)
    return config


@pytest.fixture(scope="module")
def num_moments(tmp_path_factory):
    return count_writes(tiny(tmp_path_factory.mktemp("counted") / "run", *OPTIONS))


def assert_survives(folder, whole, moments):
    """Kill a run at the first moment, and its resumptions at the others; the last resumption ends as `whole` did."""
    config = tiny(folder / "run", *OPTIONS)
    for kill_at in moments:
        resume = kill_at != moments[0] or config.directory.exists()
        assert in_a_process(lambda at=kill_at, on=resume: count_writes(config, at, on)) in (0, -signal.SIGKILL)
    run(config, resume=True)
    assert_same(config.directory, whole)
    assert {path.name for path in config.directory.iterdir()} == {path.name for path in whole.iterdir()}
    for name in (CONFIG_FILE, CLIENTS_FILE, BEST_FILE):
        assert (config.directory / name).read_bytes() == (whole / name).read_bytes()


@given(st.data())
@settings(max_examples=4)
def test_run_killed_between_any_writes_has_the_same_bits(tmp_path_factory, whole, num_moments, data):
    moments = data.draw(st.lists(st.integers(0, num_moments - 1), min_size=1, max_size=2))
    assert_survives(tmp_path_factory.mktemp("killed"), whole, moments)


@pytest.mark.slow
def test_run_killed_at_each_write_has_the_same_bits(tmp_path, whole, num_moments):
    assert num_moments > 40
    for moment in range(num_moments):
        assert_survives(tmp_path / str(moment), whole, [moment])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_run_with_workers_killed_at_any_time_has_the_same_bits(seed, tmp_path):
    whole = run(tiny(tmp_path / "whole", *OPTIONS, "engine=sequential"))
    directory = tmp_path / "run"
    arguments = [QUICKSTART, *TINY[1:], *OPTIONS, "engine=processes", f"output={directory}"]
    command = [sys.executable, "-m", "train", "run", *arguments]
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_until(directory.exists)
    time.sleep(random.Random(seed).uniform(0, 1.5))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([*command, "--resume"], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    assert_same(directory, whole)


def test_resume_with_more_rounds_continues(tmp_path, whole):
    run(tiny(tmp_path, *OPTIONS, "rounds=2"))
    run(tiny(tmp_path, *OPTIONS), resume=True)
    assert_same(tmp_path, whole)
    assert (tmp_path / CONFIG_FILE).read_bytes() == (whole / CONFIG_FILE).read_bytes()


OTHER_RUNS = {
    "fewer rounds": (["rounds=3"], "rounds=4, not 3;"),
    "another seed too": (["rounds=5", "seed=7"], "seed=0, not 7;"),
    "another key of a section": (["local.optimizer.momentum=0.5"], "local.optimizer.momentum=0.9, not 0.5;"),
    "another order of keep ratios, by which clients are dealt": (
        ["keep_ratio={0.4: 0.4, 0.2: 0.6}"],
        "keep_ratio={'0.2': 0.6, '0.4': 0.4}, not in another order;",
    ),
}


def assert_refused(config, told):
    """Check that a run is not resumed, and that its files stay as they are."""
    before = {path.name: path.read_bytes() for path in config.directory.iterdir()}
    with pytest.raises(UserError, match=told):
        run(config, resume=True)
    assert before == {path.name: path.read_bytes() for path in config.directory.iterdir()}


@pytest.mark.parametrize(("changed", "told"), OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_resume_with_another_configuration_is_refused(changed, told, whole):
    assert_refused(tiny(whole, *OPTIONS, *changed), f"holds a run with {told}")


def test_resume_with_options_that_change_no_result_continues(whole):
    free = ["tracker={name: wandb, mode: offline}", "checkpoint_every=2"]
    check_directory(tiny(whole, *OPTIONS, *free), resume=True)


@pytest.mark.parametrize("key", ["samples", "classes", "digest"])
def test_resume_with_other_data_is_refused(key, tmp_path, whole):
    config = continued(whole, tmp_path)
    (config.directory / MODEL_FILE).unlink()  # so that it has not finished
    path = config.directory / CLIENTS_FILE
    clients = json.loads(path.read_text())
    clients["quickstart"][key] = clients["quickstart"][key][::-1]
    path.write_text(json.dumps(clients))
    assert_refused(config, "was started with other data than the present quickstart")


def test_resume_where_the_residual_would_be_rounded_otherwise_trains_all_clients(tmp_path, monkeypatch):
    options = ["residual=float32", "strategy=top_n", "local.schedule=constant"]
    run(tiny(tmp_path, *options, "rounds=1"))

    def rounded(*arguments, **options):
        model = factorize(*arguments, **options)
        for stored in residual_layers(model).values():
            stored.mul_(1 + 1e-6)
        return model

    monkeypatch.setattr("train.experiment.assembly.factorize", rounded)  # as on another processor
    run(tiny(tmp_path, *options, "rounds=2"), resume=True)
    assert [line["num_aggregated"] for line in read(tmp_path)] == [3, 3]


@pytest.mark.usefixtures("undrawn")
def test_resume_without_a_run_starts_and_logs_it(tmp_path, caplog):
    words = ["run", QUICKSTART, *TINY[1:], "rounds=1", f"output={tmp_path / 'run'}", "--resume"]
    assert main(words) == 0
    assert f"{tmp_path / 'run'} holds no run to resume" in caplog.text


def test_resume_from_a_damaged_checkpoint_uses_the_previous_one(tmp_path, whole, cut, caplog):
    config = continued(cut, tmp_path)
    path = config.directory / CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:5000])
    run(config, resume=True)
    assert_same(config.directory, whole)
    assert f"{CHECKPOINT_FILE} cannot be used" in caplog.text
    assert "rounds 2 to 2 are run again" in caplog.text


def test_resume_without_checkpoints_starts_again(tmp_path, whole, cut, caplog):
    config = continued(cut, tmp_path)
    for name in (CHECKPOINT_FILE, PREVIOUS_FILE):
        (config.directory / name).unlink()
    run(config, resume=True)
    assert_same(config.directory, whole)
    assert "rounds 0 to 2 are run again" in caplog.text


METRICS = {
    "first line gone": lambda lines: lines[1:],
    "last newline lost": lambda lines: [*lines[:-1], lines[-1].rstrip()],
    "garbage": lambda lines: [lines[0], b"{garbage\n", lines[2]],
    "a list": lambda lines: [lines[0], b"[]\n"],
    "no round": lambda lines: [*lines[:2], b"{}\n"],
    "a round twice": lambda lines: [lines[0], *lines],
}


@pytest.mark.parametrize("spoil", METRICS.values(), ids=METRICS)
def test_resume_with_damaged_or_short_metrics_rewrites_them(spoil, tmp_path, whole, cut):
    config = continued(cut, tmp_path)
    path = config.directory / METRICS_FILE
    path.write_bytes(b"".join(spoil(path.read_bytes().splitlines(keepends=True))))
    run(config, resume=True)
    assert_same(config.directory, whole)


def test_is_finished_needs_a_valid_model_file(tmp_path, whole):
    config = continued(whole, tmp_path)
    assert is_finished(config)
    (config.directory / MODEL_FILE).unlink()
    assert not is_finished(config)
    run(config, resume=True)  # trains nothing, and writes the model
    assert (config.directory / MODEL_FILE).read_bytes() == (whole / MODEL_FILE).read_bytes()
    path = config.directory / CHECKPOINT_FILE
    for spoiled in (path.read_bytes()[:100], (whole / PREVIOUS_FILE).read_bytes()):
        path.write_bytes(spoiled)
        assert not is_measured(config)
        assert not is_finished(config)
    run(config, resume=True)
    assert_same(config.directory, whole)
    for name in (CHECKPOINT_FILE, PREVIOUS_FILE, MODEL_FILE):
        (config.directory / name).unlink()
    assert is_measured(config)  # all that a table needs


def test_load_model_of_a_missing_or_damaged_file_raises(tmp_path, whole):
    with pytest.raises(UserError, match=f"holds no run of this version: {CONFIG_FILE}"):
        load_model(tmp_path)
    shutil.copy(whole / CONFIG_FILE, tmp_path)
    with pytest.raises(UserError, match="--resume"):
        load_model(tmp_path)
    (tmp_path / MODEL_FILE).write_bytes((whole / MODEL_FILE).read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "asked", [{"name": "mlp", "hidden": [10**6]}, {"name": "resnet18_gn", "width": 64, "groups": 2, "blocks": [10**9]}]
)
def test_load_model_larger_than_its_file_raises(tmp_path, whole, asked):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    config = tmp_path / CONFIG_FILE
    config.write_text(dump_yaml(read_yaml(config) | {"model": asked}))
    with pytest.raises(UserError, match=r"cannot load .* takes more than .* bytes, and the file has"):
        load_model(tmp_path)


def test_resume_without_the_optimizer_state_is_refused(tmp_path, whole):
    config = continued(whole, tmp_path)
    path = config.directory / CHECKPOINT_FILE
    checkpoint = Checkpoint.read(path)
    left = {name: tensor for name, tensor in checkpoint.state.items() if not name.startswith(".server/")}
    path.write_bytes(Checkpoint(checkpoint.rounds, left).to_bytes())
    (config.directory / MODEL_FILE).unlink()
    with pytest.raises(UserError, match="only one of the state and the server has an average of models"):
        run(config, resume=True)


@pytest.mark.parametrize("norms", [None, [1.0], [1.0] * 41])
def test_sampler_restore_of_invalid_gradient_norms_raises(norms):
    state = {} if norms is None else {".sampler/gradient_norms": torch.tensor(norms)}
    with pytest.raises(UserError, match=r"the checkpoint's sampler .* gradient_norms are not one per client"):
        Checkpoint(1, state).restore(nn.Sequential(), {"sampler": StatisticalSampler(40, 3, 0)})


def test_checkpoint_of_another_model_raises(whole):
    with pytest.raises(UserError, match="the checkpoint's model does not fit"):
        Checkpoint.read(whole / CHECKPOINT_FILE).restore(nn.Linear(2, 2))


def test_run_keeps_two_checkpoints_and_the_best_model(whole):
    lines = read(whole)
    accuracies = [line["test_accuracy"] for line in lines]
    assert Checkpoint.read(whole / CHECKPOINT_FILE).rounds == 4
    assert Checkpoint.read(whole / PREVIOUS_FILE).rounds == 3
    assert rounds_of(whole / BEST_FILE, "model") == accuracies.index(max(accuracies)) + 1
    mask = os.umask(0)
    os.umask(mask)
    for path in whole.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.fixture
def heeded(number):
    """A signal as a terminal leaves it: tests under nohup, or behind an &, inherit that it is ignored."""
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    signal.signal(number, before)


def test_checkpoints_are_at_most_a_minute_and_a_round_apart(tmp_path, monkeypatch):
    seconds = iter([0, 59, 60, 61, 62, 119, 122, 123])  # at the start; after each round, and after each checkpoint
    monkeypatch.setattr(saving, "monotonic", lambda: next(seconds))
    directory, saved = tmp_path / "run", []
    config = tiny(directory, *OPTIONS, "rounds=5", "checkpoint_every=100")
    run(config, [EachRound(lambda metrics: saved.append(rounds_of(directory / CHECKPOINT_FILE)))])
    assert saved == [None, 2, 2, 2, 5]  # 59 s, 60 s, then 1 s, 58 s and 61 s after the second


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_a_run_after_the_current_round(number, tmp_path, whole):
    config = tiny(tmp_path / "run", *OPTIONS, "checkpoint_every=100")

    def tell(metrics):
        if metrics["round"] == 0:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped) as stopped:
        run(config, [EachRound(tell)])
    assert stopped.value.signal == number
    assert len(read(config.directory)) == Checkpoint.read(config.directory / CHECKPOINT_FILE).rounds == 2
    run(config, resume=True)
    assert_same(config.directory, whole)


def test_second_interrupt_stops_a_run_at_once(tmp_path):
    config = tiny(tmp_path / "run", *OPTIONS)

    def tell(metrics):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(config, [EachRound(tell)])
    assert not isinstance(stopped.value, Stopped)
    assert len(read(config.directory)) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_second_run_in_a_locked_directory_is_refused(tmp_path):
    config = tiny(tmp_path / "run", *OPTIONS, "rounds=2")

    def second(metrics):
        for resume, told in ((False, "already holds a run"), (True, "another run writes to")):
            with pytest.raises(UserError, match=told):
                run(config, resume=resume)

    run(config, [EachRound(second)])
    assert [line["round"] for line in read(config.directory)] == [0, 1]


@pytest.mark.parametrize("name", [CHECKPOINT_FILE, BEST_FILE, "summary.md", "accuracy_vs_bytes.png"])
def test_run_in_a_folder_with_other_files_is_refused(name, tmp_path):
    config = tiny(tmp_path / "run", *OPTIONS)
    config.directory.mkdir()
    (config.directory / name).write_text("thesis")
    with pytest.raises(UserError, match=f"{name}"):
        run(config)
    assert [path.name for path in config.directory.iterdir()] == [name]
    assert (config.directory / name).read_text() == "thesis"


def test_checkpoint_without_a_run_is_neither_loaded_nor_overwritten(tmp_path, whole):
    config = tiny(tmp_path / "run", *OPTIONS)
    config.directory.mkdir()
    shutil.copy(whole / CHECKPOINT_FILE, config.directory)
    with pytest.raises(UserError, match=f"already has a {CHECKPOINT_FILE}"):
        run(config)
    with pytest.raises(UserError, match=f"holds {CHECKPOINT_FILE} but no {CONFIG_FILE}"):
        run(config, resume=True)


def test_resume_removes_temporary_files(tmp_path):
    config = tiny(tmp_path / "run", *OPTIONS)
    cut_off(config, after=0)
    for name in (CHECKPOINT_FILE, "notes"):
        (config.directory / f"{name}{UNFINISHED}").write_text("half")
    run(config, resume=True)
    assert [path.name for path in config.directory.glob(f"*{UNFINISHED}")] == [f"notes{UNFINISHED}"]


def test_run_on_a_full_disk_prints_one_line_and_keeps_checkpoints(tmp_path, whole):
    config = tiny(tmp_path / "run", *OPTIONS)

    def fill(metrics):
        if metrics["round"] == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    def action():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(RunError, match=r"^cannot write .*safetensors: File too large; .*--resume[^\n]*$"):
            run(config, [EachRound(fill)])

    assert in_a_process(action) == 0
    assert Checkpoint.read(config.directory / CHECKPOINT_FILE).rounds == len(read(config.directory)) == 2
    assert not list(config.directory.glob(f"*{UNFINISHED}"))
    run(config, resume=True)
    assert_same(config.directory, whole)


def test_metrics_that_cannot_be_written_print_one_line(tmp_path, whole, monkeypatch):
    config = tiny(tmp_path / "run", *OPTIONS)
    fsync = os.fsync

    def fail(descriptor):
        if METRICS_FILE in os.readlink(f"/proc/self/fd/{descriptor}") and len(read(config.directory)) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match=f"cannot write .*{METRICS_FILE}: No space left"):
        run(config)
    monkeypatch.undo()
    run(config, resume=True)
    assert_same(config.directory, whole)


def test_interrupt_during_import_prints_one_line():
    code = "import os, runpy, signal, sys\nclass Interrupt:\n def find_spec(self, name, *place):\n"
    code += "  if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
    code += "sys.meta_path.insert(0, Interrupt())\nrunpy.run_module('train', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_worker_process_does_not_import_the_command_line():
    code = "import runpy, sys; runpy.run_module('train.__main__', run_name='__mp_main__'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"train.cli.commands", "matplotlib", "pandas", "torch"} & {*done.stdout.split()}


def cells_in(folder, *options):
    strategies = ["dense", "top_n", "full"]
    cells = grid_configs(QUICKSTART, [*TINY[1:], *options], strategies, None)
    return [cell.model_copy(update={"output": folder / cell.strategy}) for cell in cells]


# The signals come from others than the comparison.
@pytest.mark.parametrize("end", ["kill", pytest.param("terminate", marks=pytest.mark.slow)])
def test_sweep_with_a_killed_worker_finishes_the_others(tmp_path, end):
    cells, killed = [*cells_in(tmp_path, "rounds=40")[:1], *cells_in(tmp_path)[1:]], []

    def kill(index, metrics):
        if index == 0 and not killed:
            killed.append(active_children()[0])
            getattr(killed[0], end)()

    failures = sweep(cells, kill, jobs=1)
    (failure,) = failures.values()
    assert list(failures) == [cells[0].directory]
    assert "its process was stopped or killed" in failure.reason
    assert "--resume" in failure.reason
    assert [is_finished(cell) for cell in cells] == [False, True, True]


def test_signal_stops_running_and_waiting_cells(tmp_path):
    cells = cells_in(tmp_path, "rounds=100000", "checkpoint_every=100000")

    def stop(index, metrics):
        if metrics["round"] == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped):
        sweep(cells, stop, jobs=1)
    lines = read(cells[0].directory)
    assert Checkpoint.read(cells[0].directory / CHECKPOINT_FILE).rounds == len(lines)
    assert not cells[1].directory.exists()
    assert not active_children()
