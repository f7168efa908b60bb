"""The study of differential privacy: methods at the same ε and of the same size, and a table of what was chosen."""

from studies import privacy
from studies.curves import by_scheme
from studies.runner import CONFIGS
from train.config.schema import load_config
from train.data import empty_dataset
from train.experiment.assembly import make_model, make_planner
from train.experiment.budget import spent_epsilon

TABLE = """
| 2 | dense | 50.0 ± 0.0 | – | 0.5 | 0.3 |
| 2 | narrow | 60.0 ± 10.0 | +10.0 ± 7.1 | 0.5 | 0.3 |
"""


def test_every_method_spends_the_same():
    for method in privacy.METHODS:
        config = load_config(CONFIGS / "privacy.yaml", privacy.words_of((method, 2.0, 0.5, 0.3)))
        assert 1.99 < spent_epsilon(config, config.rounds) <= 2.0


def test_narrow_network_has_the_numbers_of_a_shard():
    def numbers(method):
        config = load_config(CONFIGS / "privacy.yaml", privacy.words_of((method, 2.0, 0.5, 0.3)))
        model = make_model(config, empty_dataset("digits"))
        shard = make_planner(config).plan(model, {0: config.keep_ratio}).shard(0)
        return sum(part.numel() for part in shard.trained().values())

    assert 0.97 < numbers("narrow") / numbers("top_n 0.1") <= 1.0
    assert numbers("narrow") < numbers("top_n 0.2") < numbers("dense") < numbers("full")


def test_table_has_accuracies_and_differences_to_dense_by_seed(curves_of, monkeypatch):
    monkeypatch.setattr(privacy, "EPSILONS", (2.0,))
    monkeypatch.setattr(privacy, "METHODS", {name: privacy.METHODS[name] for name in ("dense", "narrow")})
    accuracies = {"dense, ε=2": (0.5, 0.5), "narrow, ε=2": (0.529289321881, 0.670710678118)}
    curves = {
        f"{scheme}-{seed}": [{"bytes_up": 1, "bytes_down": 1, "test_accuracy": accuracy}]
        for scheme, of_seeds in accuracies.items()
        for seed, accuracy in enumerate(of_seeds)
    }
    settings = {scheme: (scheme, 2.0, 0.5, 0.3) for scheme in accuracies}
    table = privacy.table(by_scheme(curves_of(curves)), settings)
    assert [" | ".join(row) for row in table.to_numpy()] == [line.strip("| ") for line in TABLE.strip().splitlines()]
    assert privacy.picture(by_scheme(curves_of(curves))).axes[0].get_legend_handles_labels()[1] == ["dense", "narrow"]
