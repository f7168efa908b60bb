"""Setups 1 and 3 of the wireless study: they are the published ones, and all of it runs, once."""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import studies
import wireless_mnist
from arrivals import SCHEMES
from studies import folder

from train import pilots
from train.config import load_config
from train.experiment import assemble
from train.run import run


@pytest.mark.parametrize(
    ("number", "clients", "classes", "draws", "samples"), [(1, 40, 10, 4, 33_036), (3, 100, 6, 10, 15_129)]
)
def test_the_setups_are_the_published_ones(number, clients, classes, draws, samples):
    experiment = assemble(
        load_config(wireless_mnist.CONFIGS / f"{wireless_mnist.SETUPS[number].config}.yaml", ["seed=4"])
    )
    sizes = np.array(list(experiment.num_samples.values()))
    assert (len(sizes), sizes.sum(), experiment.sampler.per_round) == (clients, samples, draws)
    kinds = [len(experiment.job.clients[c].targets.unique()) for c in range(clients)]
    assert (min(kinds), max(kinds)) == (1, classes)
    assert sizes.max() > 40 * np.median(sizes) / clients**0.5, "few are large"
    local, profiles = experiment.config.local, experiment.sampler.population.profiles
    assert (local.steps, local.batch_size, local.schedule, local.momentum) == (50, 24, "inverse", 0)
    parameters = list(experiment.model.parameters())
    if number == 3:
        lenet = (25 + 1) * 6 + (6 * 25 + 1) * 16 + (16 * 49 + 1) * 120 + 121 * 84 + 85 * 10
        assert sum(parameter.numel() for parameter in parameters) == lenet
        assert 0.7 < profiles.compute.mean() < 1.3
    else:
        assert not any(parameter.any() for parameter in parameters)
        assert sum(parameter.numel() for parameter in parameters) == 785 * 10
        assert 0.45 <= profiles.compute.min() < profiles.compute.max() <= 0.55
        assert 0.22 <= profiles.communicate.min() < 1 < 4 < profiles.communicate.max() <= 5.04


def one_after_the_other(started):
    def compare(cells, show, jobs, resume):
        for cell in cells:
            started.append(cell.directory.name)
            run(cell, lambda metrics: None, resume)
        return {}

    return compare


def first(lines, reached, amount):
    """What an amount, summed up, came to at the first evaluation at which a condition held."""
    total = 0.0
    for line in lines:
        total += amount(line)
        if "test_accuracy" in line and reached(line):
            return total
    return None


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_study_in_a_few_rounds(tmp_path, monkeypatch, number):
    started, learned, learn = [], [], pilots.learn
    monkeypatch.setattr(studies, "compare", one_after_the_other(started))
    monkeypatch.setattr(pilots, "learn", lambda experiment: learned.append(1) or learn(experiment))
    wireless_mnist.main(tmp_path, number, [], True, None, 1)
    assert len(started) == 2 * len(SCHEMES)
    assert len(learned) == 1, "pilots are run once for a world"
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "nan" not in text.lower()
    rows = {row.split(" | ")[0][2:]: row.split(" | ") for row in text.splitlines() if row.startswith("| ")}
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        written = {(row["scheme"], int(row["seed"])): list(row.values()) for row in csv.DictReader(file)}
    for scheme in SCHEMES:
        arrived = []
        for seed in (0, 1):
            path = tmp_path / "runs" / f"{folder(scheme)}-{seed}" / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            at_loss = first(lines, lambda line: line["train_set_loss"] <= 2.0, lambda line: line["simulated_seconds"])
            rounds = first(lines, lambda line: line["train_set_loss"] <= 2.0, lambda line: 1)
            at_40 = first(lines, lambda line: line["test_accuracy"] >= 0.4, lambda line: line["simulated_seconds"])
            told = ["" if value is None else f"{value:.0f}" for value in (rounds, at_loss, at_40)]
            assert written[scheme, seed][2:6] == [str(len(lines)), *told]
            arrived += [] if at_loss is None else [at_loss]
        assert rows[scheme][-1] == f"{len(arrived)} of 2 |"
        mean = re.match(r"[\d,]+|not reached", rows[scheme][2])[0]
        assert mean == (f"{np.mean(arrived):,.0f}" if arrived else "not reached")
    wireless_mnist.main(tmp_path, number, [], True, None, 1)
    shutil.rmtree(tmp_path / "runs")
    wireless_mnist.main(tmp_path, number, [], True, None, 1)  # of the curves alone
    assert len(started) == 2 * len(SCHEMES), "what is there is not run again"
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text


def test_schemes_with_short_rounds_have_more_of_them(tmp_path):
    setup = wireless_mnist.SETUPS[3]
    schemes = setup.rounds_of(wireless_mnist.TAUGHT)
    configs = studies.cells(wireless_mnist.CONFIGS / f"{setup.config}.yaml", schemes, [0], tmp_path, [])
    limits = {name.removesuffix("-0"): config.rounds for name, config in configs.items()}
    assert limits == {"proposed": 1000, "Eq. 38": 600, "statistical": 400}
