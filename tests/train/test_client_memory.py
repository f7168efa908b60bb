"""The memory of a client that `inspect` reports, against exact counts and against a process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sharding import ShardPlanner
from tests.train.runs import REPOSITORY
from train.cli.client_memory import PeakMemory, client_memory
from train.config.schema import load_config
from train.experiment.assembly import first_model, make_model, make_planner, read_dataset

PROCESS = """
import re, sys, torch
from dataclasses import replace
from pathlib import Path
from train.experiment.assembly import first_model, make_model, make_planner, read_dataset
from train.cli.client_memory import random_shard
from train.config.schema import load_config
from train.engines import Job
from train.engines.sequential import SequentialEngine
from sharding import init_empty

def kilobytes(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def train(config, shard=None):
    dataset = read_dataset(config)
    with init_empty():
        structure = make_model(config, dataset)
    planner = make_planner(config)
    job = Job(structure, {0: dataset.test}, dataset, config.local, 0)
    before = kilobytes("VmRSS")
    shard = random_shard(planner.template(structure, config.keep_ratio))
    update = SequentialEngine(job).train_client(0, shard, 0, 0.01)
    assert update.failure is None, update.failure
    return 1024 * (kilobytes("VmHWM") - before)

train(load_config(sys.argv[1], [*sys.argv[2:], "model.hidden=[8, 8]"]))
print(train(load_config(sys.argv[1], sys.argv[2:])))
"""


def memory_of(*overrides):
    config = load_config("configs/quickstart.yaml", overrides)
    dataset, planner = read_dataset(config), make_planner(config)
    model = first_model(config, make_model(config, dataset), planner.strategy, [config.keep_ratio])
    return model, client_memory(planner, model, config.keep_ratio, config.keep_ratio, dataset, config.local)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [("sgd, lr: 0.1, momentum: 0", 0), ("sgd, lr: 0.1, momentum: 0.9", 1), ("adamw, lr: 0.1", 2)],
)
def test_memory_of_a_dense_client_counts_model_gradients_and_states(optimizer, states):
    mlp = "model={name: mlp, hidden: [600, 600]}"
    model, memory = memory_of("strategy=dense", mlp, "keep_ratio=1", f"local.optimizer={{name: {optimizer}}}")
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert memory.model == size
    assert memory.frozen == 0
    assert states * size <= memory.optimizer <= states * size + 100  # adamw counts steps
    assert memory.shard == ShardPlanner("dense").nbytes(model, 1.0)
    assert memory.gradients == size
    assert 0 < memory.activations < 1.2 * size  # the decay's gradients, and little else


def test_memory_of_a_client_on_a_residual_has_the_terms_and_few_bits_of_the_rest():
    mlp = ["strategy=top_n", "model={name: mlp, hidden: [64, 256, 256]}", "keep_ratio=0.1", "residual=int4"]
    model, memory = memory_of(*mlp)
    residual = ShardPlanner("top_n").frozen(model)
    assert memory.frozen == sum(part.nbytes for part in residual.residuals.values())
    assert memory.frozen == 4.5 / 8 * (64 * 256 + 256 * 256)
    assert memory.gradients == sum(part.nbytes for part in model.parameters())
    assert memory.model == memory.gradients + 4 * (7 + 26)  # with multipliers


def test_peak_memory_counts_what_is_alive_at_once():
    with PeakMemory() as peak:
        for _ in range(3):
            x = torch.ones(1000)
            y = x + 1
            y.view(10, 100).mul_(2)
            del x, y
    assert peak.nbytes == 8000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=dense", "keep_ratio=1", "model={name: mlp, hidden: [3000, 3000]}"),
        ("strategy=top_n", "keep_ratio=0.4", "model={name: mlp, hidden: [64, 4000, 4000]}"),
    ],
)
def test_memory_agrees_with_a_process_within_a_fifth(overrides):
    shared = ["local.steps=2", "local.batch_size=32", "init=as_built", *overrides]
    command = [sys.executable, "-c", PROCESS, "configs/quickstart.yaml", *shared]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, memory = memory_of(*shared)
    measured = int(re.search(r"\d+", done.stdout)[0])
    print(f"{memory.total / 1e6:.0f} MB told, {measured / 1e6:.0f} MB measured")
    assert 0.8 < memory.total / measured < 1.25


def test_peak_memory_does_not_count_tensors_without_values():
    with PeakMemory() as peak:
        small = torch.ones(10)
        torch.empty(1000, device="meta").add(1)
    assert peak.nbytes == small.nbytes
