"""The setups of the wireless study: they are the published ones, and all of it runs, once."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from studies import runner, wireless
from studies.curves import read_curves
from studies.runner import CONFIGS, Arguments
from studies.wireless import SCHEMES, SETUPS
from train.config.schema import load_config
from train.experiment.assembly import assemble
from train.variants import pilots

FEW = (
    *("clients.count=20", "clients.per_round=4", "clients.pilot_losses=[2.2, 2.1]"),
    *("local.steps=5", "local.batch_size=8", "local.optimizer.lr=0.3"),
    *("rounds=8", "evaluate_every=2", "target_loss=2.0", "target_accuracy=0.4"),
)
DATA = {
    "wireless_synthetic": ("data={clients: 20, samples: 600}",),
    "wireless_mnist": ("data=digits", "data.partition={samples: 600, classes: [1, 6]}"),
}


@pytest.mark.parametrize(
    ("name", "clients", "classes", "draws", "samples"),
    [("wireless_logistic", 40, 10, 4, 33_036), ("wireless_mnist", 100, 6, 10, 15_129)],
)
def test_wireless_setups_of_images_are_the_published_ones(name, clients, classes, draws, samples, drawn_data):
    experiment = assemble(load_config(CONFIGS / f"{name}.yaml", ["seed=4", f"data.root={drawn_data}"]))
    sizes = np.array(list(experiment.num_samples.values()))
    assert (len(sizes), sizes.sum(), experiment.sampler.per_round) == (clients, samples, draws)
    kinds = [len(experiment.job.clients[c].targets.unique()) for c in range(clients)]
    assert (min(kinds), max(kinds)) == (1, classes)
    assert sizes.max() > 40 * np.median(sizes) / clients**0.5, "few are large"
    local, profiles = experiment.config.local, experiment.sampler.population.profiles
    assert (local.steps, local.batch_size, local.schedule.name, local.optimizer.options["momentum"]) == (
        50,
        24,
        "inverse",
        0,
    )
    parameters = list(experiment.model.parameters())
    if name == "wireless_mnist":
        lenet = (25 + 1) * 6 + (6 * 25 + 1) * 16 + (16 * 49 + 1) * 120 + 121 * 84 + 85 * 10
        assert sum(parameter.numel() for parameter in parameters) == lenet
        assert 0.7 < profiles.compute.mean() < 1.3
    else:
        assert not any(parameter.any() for parameter in parameters)
        assert sum(parameter.numel() for parameter in parameters) == 785 * 10
        assert 0.45 <= profiles.compute.min() < profiles.compute.max() <= 0.55
        assert 0.22 <= profiles.communicate.min() < 1 < 4 < profiles.communicate.max() <= 5.04


def test_wireless_setup_2_is_the_published_one():
    experiment = assemble(load_config(CONFIGS / "wireless_synthetic.yaml", ["seed=4"]))
    sizes = np.array(list(experiment.num_samples.values()))
    assert (len(sizes), experiment.sampler.per_round) == (100, 10)
    assert sizes.sum() + len(experiment.dataset.test) == 20_509
    assert 100 * ((sizes / sizes.sum()) ** 2).sum() == pytest.approx(6.05, abs=0.1)
    local = experiment.config.local
    assert (local.steps, local.batch_size, *local.optimizer.options.values(), local.schedule.name) == (
        50,
        24,
        0.1,
        0,
        "inverse",
    )
    parameters = [(tuple(part.shape), bool(part.any())) for part in experiment.model.parameters()]
    assert parameters == [((10, 60), False), ((10,), False)]


@pytest.mark.parametrize("name", ["wireless_synthetic", pytest.param("wireless_mnist", marks=pytest.mark.slow)])
def test_wireless_study_of_a_few_rounds_runs(tmp_path, monkeypatch, name, started):
    learned, calibrate = [], pilots.calibrate
    monkeypatch.setattr(pilots, "calibrate", lambda *given: learned.append(1) or calibrate(*given))
    setup, arguments = replace(SETUPS[name], longer={}), Arguments(name, tmp_path, (*DATA[name], *FEW), seeds=(0, 1))
    wireless.run(setup, arguments)
    assert len(started) == 2 * len(SCHEMES)
    assert len(learned) == 1, "pilots are run once for a world"
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "nan" not in text.lower()
    rows = {row.split(" | ")[0][2:]: row.split(" | ") for row in text.splitlines() if row.startswith("| ")}
    curves = read_curves(tmp_path / "curves.csv")
    assert curves.run.nunique() == 2 * len(SCHEMES)
    for scheme in SCHEMES:
        rounds = curves[curves.run.str.startswith((f"{scheme}-0 ", f"{scheme}-1 "))]
        arrived = rounds.run[rounds.train_set_loss <= 2.0].nunique()
        assert rows[scheme][-1] == f"{arrived} of 2 |"
    wireless.run(setup, arguments)
    shutil.rmtree(tmp_path / "runs")
    wireless.run(setup, arguments)  # only of the curves
    assert len(started) == 2 * len(SCHEMES), "what is there is not run again"
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text


def test_schemes_with_short_rounds_run_more_rounds(tmp_path):
    schemes = SETUPS["wireless_mnist"].rounds_of(wireless.WITH_PILOTS)
    configs = runner.configs_of(CONFIGS / "wireless_mnist.yaml", schemes, [0], tmp_path)
    limits = {name.removesuffix("-0"): config.rounds for name, config in configs.items()}
    assert limits == {"proposed": 1000, "Eq. 38": 600, "statistical": 400}
