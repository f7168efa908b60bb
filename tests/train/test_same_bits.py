"""The same seed gives the same bits with any number of processes, and after an interruption."""

import json
import os
import signal
import subprocess
import sys
from itertools import cycle

import pytest
import torch

from sharding import SAMPLERS
from tests.train.runs import QUICKSTART, REPOSITORY, RESNET, assert_same, cut_off, cut_off_and_resumed, read, tiny
from train.callbacks import EachRound
from train.run import run
from train.rundir.file_names import PROVENANCE_FILE
from train.utils.signals import Stopped

SAMPLING = {
    "uniform": ["clients.sampler.replacement=true"],
    "weighted": ["data.partition=power_law"],
    "uniform_upload": ["clients.sampler.budget=1.5"],
    "ocs": ["clients.sampler.budget=1.5"],
    "aocs": ["clients.sampler.budget=1.5"],
    "ocs_partial": ["clients.sampler.budget=0.6"],
    "wireless": ["network.bandwidth=2", "clients.sampler.beta_over_alpha=1e-3"],
    "mmfl": [
        "clients.count=8",
        "clients.per_round=8",
        "local.batch_size=64",
        "clients.sampler.budget=4",
        "tasks={one: {}, two: {seed: 5}}",
    ],
}
OPTIMIZERS = [
    ["result=average", "server_optimizer={name: plain, lr: 0.1}"],
    ["server_optimizer={name: momentum, lr: 0.1, momentum: 0.7}"],
    ["server_optimizer={name: nesterov, lr: 0.1, momentum: 0.7}"],
    *([f"server_optimizer={{name: {name}, lr: 0.1}}"] for name in ("fedadam", "fedyogi", "adamw", "adafactor")),
    ["local.optimizer={name: adamw, lr: 0.001, weight_decay: 0.1}"],
    ["residual=int4", "strategy=top_n", "keep_ratio=0.2"],
]


def died(config):
    cut_off(config, after=1)


def stopped(config):
    def tell(metrics):
        if metrics["round"] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        run(config, [EachRound(tell)])


INTERRUPTIONS = [died, stopped]
ENGINES = ["sequential", "lanes", "processes", "lanes", "sequential"]  # processes are slow to start
ROWS = [*zip(SAMPLERS, cycle(OPTIMIZERS), cycle(INTERRUPTIONS), cycle(ENGINES), cycle(ENGINES[1:]), strict=False)]


@pytest.mark.parametrize(
    ("sampler", "optimizer", "interrupt", "engine", "next_engine"), ROWS, ids=[row[0] for row in ROWS]
)
def test_run_interrupted_and_resumed_on_another_engine_has_the_same_bits(
    sampler, optimizer, interrupt, engine, next_engine, tmp_path
):
    """Every sampler, and every optimizer of servers and clients, whose state a checkpoint keeps."""
    options = [f"clients.sampler={sampler}", *SAMPLING.get(sampler, []), *optimizer, "rounds=3", "checkpoint_every=1"]
    whole = run(tiny(tmp_path / "whole", *options))
    interrupt(tiny(tmp_path / "run", *options, f"engine={engine}"))
    assert_same(run(tiny(tmp_path / "run", *options, f"engine={next_engine}"), resume=True), whole)
    for line in read(whole):
        assert line["num_failed"] == 0
        assert ("simulated_seconds" in line) == (sampler == "wireless")
        assert ("improvement_alpha" in line) == ("ocs" in sampler)


LONGER = ["rounds=3", "checkpoint_every=1"]
ARGUMENTS = [QUICKSTART, *RESNET[1:], *LONGER]


def train(home, *arguments, threads="1"):
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-m", "train", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_run_with_other_home_threads_workers_or_interruption_has_same_bits(tmp_path):
    """The command starts processes; `sequential` has none."""
    train(tmp_path / "home", "run", *ARGUMENTS, f"output={tmp_path / 'run'}", threads="2")
    broken = tiny(tmp_path / "broken", *LONGER, "engine=sequential", shared=RESNET)
    assert_same(cut_off_and_resumed(broken, after=1), tmp_path / "run")
    assert not list((tmp_path / "home").rglob("*spectral*"))


@pytest.mark.slow
def test_run_by_any_command_or_resumed_has_the_same_bits(tmp_path):
    whole = run(tiny(tmp_path / "sequential", *LONGER, "engine=sequential", shared=RESNET))
    compared = ["--strategies", "collective,dense", "--jobs", "9" * 30, f"output={tmp_path / 'compare'}"]
    train(tmp_path / "one", "compare", *ARGUMENTS, *compared, threads="2")
    assert_same(tmp_path / "compare" / "collective-0", whole)
    broken = tiny(tmp_path / "broken", *LONGER, shared=RESNET)
    cut_off(broken.model_copy(update={"engine": "sequential"}), after=1)
    train(tmp_path / "two", "run", *ARGUMENTS, f"output={broken.directory}", "--resume")
    assert_same(broken.directory, whole)


def test_run_writes_its_provenance(tmp_path):
    run(tiny(tmp_path / "run", "engine=auto", shared=RESNET))
    made = json.loads((tmp_path / "run" / PROVENANCE_FILE).read_text())
    assert (made["engine"], made["threads"], made["device"]) == ("auto", 1, "cpu")
    (start,) = made["starts"]
    assert (start["round"], start["torch"]) == (0, torch.__version__.partition("+")[0])
    assert start.keys() >= {"python", "numpy", "safetensors", "commit", "processor"}


def test_resume_with_another_torch_logs_a_warning(tmp_path, caplog):
    config = tiny(tmp_path / "run", *LONGER, "engine=sequential", shared=RESNET)
    cut_off(config, after=1)
    path = config.directory / PROVENANCE_FILE
    made = json.loads(path.read_text())
    made["starts"][0]["torch"] = "1.0"
    path.write_text(json.dumps(made))
    run(config, resume=True)
    again = json.loads(path.read_text())
    assert [start["round"] for start in again["starts"]] == [0, 2]
    assert "this run was started with torch 1.0; with " in caplog.text
