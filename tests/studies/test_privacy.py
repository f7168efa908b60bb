"""The study of differential privacy: methods at the same ε and of the same size, and a table of what was chosen."""

from dataclasses import replace

import pytest

from studies import privacy
from studies.curves import by_scheme, evaluations
from studies.runner import Arguments
from train.config.schema import load_config
from train.data import empty_dataset
from train.experiment.assembly import make_model, make_planner
from train.experiment.budget import spent_epsilon
from train.report.frame import round_frame

TABLE = """
| 2 | dense | 50.0 ± 0.0 | – | 0.5 | 0.3 |
| 2 | narrow | 60.0 ± 10.0 | +10.0 ± 7.1 | 0.5 | 0.3 |
"""


@pytest.fixture(params=privacy.EXPERIMENTS)
def experiment(request):
    return privacy.EXPERIMENTS[request.param]


def config_of(experiment, method, epsilon=2.0):
    words = privacy.words_of(experiment, (method, epsilon, 0.5, 0.3))
    return load_config(experiment.config, words)


def test_every_method_spends_the_same(experiment):
    for method in experiment.methods:
        config = config_of(experiment, method)
        assert 1.98 < spent_epsilon(config, config.rounds) <= 2.0


def test_narrow_network_has_the_numbers_of_a_shard(experiment):
    def numbers(method):
        config = config_of(experiment, method)
        model = make_model(config, empty_dataset(config.data.name))
        shard = make_planner(config).plan(model, {0: config.keep_ratio}).shard(0)
        return sum(part.numel() for part in shard.trained().values())

    of_width = {"privacy": 0.98, "privacy_cifar10": 1.15}  # a width 10 has 0.80
    assert numbers("narrow") / numbers("top_n 0.1") == pytest.approx(of_width[experiment.config.stem], abs=0.01)
    assert numbers("narrow") < numbers("top_n 0.2") < numbers("dense") < numbers("full")


def test_trials_choose_and_a_method_at_chance_is_not_run_with_more_noise(tmp_path, monkeypatch):
    experiment = replace(privacy.EXPERIMENTS["privacy_cifar10"], epsilons=(8.0, 2.0))
    trained = []

    def accuracy(name):
        if name.startswith("collective"):
            return 0.11
        return 0.5 + 0.01 * name.count("3, ") if "1000" in name else 0.4

    def pretend(configs, *_):
        trained.extend(configs)
        lines = {name: [{"bytes_up": 1, "bytes_down": 1, "test_accuracy": accuracy(name)}] for name in configs}
        return evaluations(round_frame(lines))

    monkeypatch.setattr(privacy, "run_here", pretend)
    privacy.run(experiment, Arguments("privacy_cifar10", tmp_path, command="python -m studies privacy_cifar10"))
    assert not any(name.startswith("collective") and "ε=2" in name for name in trained)
    assert not any(name.startswith("full") and "1000" in name for name in trained)
    assert sum(name.endswith("-1000") for name in trained) == 4 * (6 + 4)
    summary = (tmp_path / "summary.md").read_text()
    assert "| 8 | full | 40.0 ± 0.0 | +0.0 ± 0.0 | 3 | 0.3 |" in summary
    assert "| 8 | collective 0.2 |" in summary
    assert "| 2 | collective 0.2 |" not in summary


def test_table_has_accuracies_and_differences_to_dense_by_seed(curves_of):
    experiment = replace(privacy.EXPERIMENTS["privacy"], epsilons=(2.0,))
    accuracies = {"dense, ε=2": (0.5, 0.5), "narrow, ε=2": (0.529289321881, 0.670710678118)}
    curves = {
        f"{scheme}-{seed}": [{"bytes_up": 1, "bytes_down": 1, "test_accuracy": accuracy}]
        for scheme, of_seeds in accuracies.items()
        for seed, accuracy in enumerate(of_seeds)
    }
    settings = {scheme: (scheme, 2.0, 0.5, 0.3) for scheme in accuracies}
    table = privacy.table(experiment, by_scheme(curves_of(curves)), settings)
    assert [" | ".join(row) for row in table.to_numpy()] == [line.strip("| ") for line in TABLE.strip().splitlines()]
    (axes,) = privacy.picture(experiment, by_scheme(curves_of(curves))).axes
    assert axes.get_legend_handles_labels()[1][:2] == ["dense", "narrow"]
