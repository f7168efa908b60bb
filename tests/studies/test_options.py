"""Options, each at its own best rate: the rate is chosen by trials, and reported seeds train at it."""

import pytest

from sharding import UserError
from studies import __main__ as command
from studies import options
from studies.curves import by_scheme, read_curves, write_curves
from train.config.schema import load_config
from train.run import run

TINY = [
    *("data=digits", "model.width=8", "model.groups=4", "model.blocks=[1]", "clients.count=6"),
    *("clients.per_round=2", "rounds=4", "evaluate_every=1"),
]
ENDS = {0.02: 0.3, 0.03: 0.5, 0.05: 0.4}


def course(end, last):
    first = {"rounds": 1, "bytes_up": 10**9, "bytes_down": 0, "test_accuracy": 0.1}
    return [first, {"rounds": 4, "bytes_up": 4 * 10**9, "bytes_down": 0, "test_accuracy": end, "last_accuracy": last}]


def test_options_table_has_each_arm_at_its_best_rate(tmp_path, capsys, curves_of):
    arms = options.EXPERIMENTS["options"].arms
    rates = {f"low_rank, nesterov, lr {rate}-1000": course(end, end) for rate, end in ENDS.items()}
    write_curves(tmp_path / "rates.csv", curves_of(rates, options.COLUMNS))
    seeds = {f"low_rank, nesterov, lr 0.03-{seed}": course(0.5 + seed / 10, 0.4) for seed in (0, 1, 2)}
    write_curves(tmp_path / "curves.csv", curves_of(seeds, options.COLUMNS))
    assert command.main(["options", "--into", str(tmp_path), "--only", "low_rank, nesterov"]) == 0
    *_, row = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| low_rank"))
    at_best, _, cells = row.partition(" | 4 | 4.00 | ")
    assert at_best == "| low_rank, nesterov, lr 0.03"
    assert cells == "0, 1, 2 | 10.0 ± 0.0 | – | – | 60.0 ± 10.0 | 40.0 ± 0.0 | – |"
    assert len(arms) == len({tuple(arm.overrides) for arm in arms.values()})


def test_arms_table_in_any_order_has_differences_to_the_first_arm(curves_of):
    runs = {f"{name}, lr 0.1-0": course(end, end) for name, end in (("second", 0.4), ("first", 0.5))}
    table = options.arms_table(by_scheme(curves_of(runs, options.COLUMNS)), "first")
    assert table["end minus the first"].tolist() == ["-10.0 (one seed)", "–"]


def test_arm_of_one_rate_needs_no_trial(tmp_path, capsys, curves_of, monkeypatch):
    name = "r = 0.2 for all"
    runs = {f"{name}, lr 0.02-{seed}": course(0.5, 0.4) for seed in (0, 1, 2)}
    write_curves(tmp_path / "curves.csv", curves_of(runs, options.COLUMNS))
    monkeypatch.setattr("train.cli.progress.sweep", lambda *_, **__: pytest.fail("it trains"))
    assert command.main(["capacity", "--into", str(tmp_path), "--only", name]) == 0
    text = capsys.readouterr().out
    assert f"| {name}, lr 0.02 |" in text
    assert "Trials" not in text


@pytest.mark.parametrize("study", options.EXPERIMENTS)
def test_every_arm_is_a_valid_configuration(study):
    experiment = options.EXPERIMENTS[study]
    for name, arm in experiment.arms.items():
        path = options.CONFIGS / f"{experiment.on.config}.yaml"
        words = (
            options.overrides_of(experiment, arm, share, ["local.optimizer.lr=0.1"]) for share in (1, experiment.trial)
        )
        whole, trial = (load_config(path, overrides) for overrides in words)
        assert trial.rounds == round(whole.rounds * experiment.trial)
        assert whole.result == ("last" if study == "central" or name in ("HeteroFL", "FedRolex") else "average")


def test_last_model_equals_that_of_a_run_without_averaging(tmp_path, started):
    words = [*TINY, "recipe=published", "server_optimizer=nesterov", "engine=sequential"]
    path = options.CONFIGS / "quickstart.yaml"
    average = load_config(path, [*words, "result=average", f"output={tmp_path / 'average'}"])
    last = load_config(path, [*words, "result=last", f"output={tmp_path / 'last'}"])
    curve = options.run_with_last(options.run_all, {"average": average}, 1)
    run(last)
    expected = options.run_all({"last": last}, 1).test_accuracy.iloc[-1]
    assert curve.last_accuracy.iloc[-1] == expected != curve.test_accuracy.iloc[-1]
    assert curve.last_accuracy[:-1].isna().all()


def test_finished_run_of_another_configuration_is_no_run_of_this_one(tmp_path, started):
    words = [*TINY, "engine=sequential", f"output={tmp_path / 'run'}"]
    configs = [load_config(options.CONFIGS / "quickstart.yaml", [*words, f"local.decay={decay}"]) for decay in (0, 1)]
    options.run_all({"run": configs[0]}, 1)
    with pytest.raises(UserError, match=r"holds a run with local\.decay=0"):
        options.run_all({"run": configs[1]}, 1)


@pytest.mark.slow
def test_options_study_run_twice_trains_once(tmp_path):
    words = ["options", *TINY, "--into", str(tmp_path), "--only", "low_rank", "--seeds", "0"]
    assert command.main(words) == 0
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert read_curves(tmp_path / "rates.csv").run.nunique() == 3
    assert command.main(words) == 0
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text
