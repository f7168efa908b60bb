"""The protocol beyond the paper: one table of what there is, made of the runs alone, and all of it runs."""

from dataclasses import replace

import pytest

from studies import __main__ as command
from studies import beyond, options, width
from studies.curves import by_scheme, read_curves, write_curves
from studies.runner import CONFIGS
from train.config.schema import load_config
from train.data import empty_dataset
from train.experiment.assembly import make_model, make_planner

TINY = [
    *("data=digits", "model.width=8", "model.groups=4", "model.blocks=[1]", "clients.count=6"),
    *("clients.per_round=2", "rounds=2", "evaluate_every=1"),
]


def course(*accuracies):
    return [{"bytes_up": t * 10**9, "bytes_down": 0, "test_accuracy": a} for t, a in enumerate(accuracies, start=1)]


def test_table_row_has_the_curve_and_the_paired_difference(curves_of):
    slow = {"collective-0": course(0.1, 0.2, 0.3, 0.4), "collective-1": course(0.1, 0.2, 0.3, 0.6)}
    fast = {
        f"top_n-{seed}": course(*accuracies)
        for seed, accuracies in enumerate([(0.3, 0.4, 0.6, 0.5), (0.3, 0.4, 0.6, 0.9)])
    }
    experiment = beyond.EXPERIMENTS["beyond"]
    table = beyond.table(experiment, by_scheme(curves_of(fast | slow | {"top_n-2": course(0, 0, 0, 0)})))
    assert list(table.iloc[0]) == [
        *("collective", 4, "4.0", "0, 1", "10.0 ± 0.0", "20.0 ± 0.0", "30.0 ± 0.0", "50.0 ± 14.1", "50.0 ± 14.1", "–")
    ]
    assert table.iloc[1, 0] == "top_n", "in the order of the experiment"
    assert table.iloc[1, -1] == "+20.0 ± 10.0"  # of seeds 0 and 1: 10 and 30 points
    alone = beyond.table(experiment, by_scheme(curves_of({"top_n-0": course(0.1, 0.2)})))
    assert (alone.iloc[0, -1], alone["25 %"][0]) == ("–", "–")


def test_table_with_committed_curves_keeps_them(tmp_path, curves_of):
    curves = curves_of({"collective-0": course(0.1, 0.25), "top_n-0": course(0.1, 0.5)})
    write_curves(tmp_path / "curves.csv", curves)
    command.main(["beyond", "--into", str(tmp_path), "--only"])
    assert "| +25.0 (one seed) |" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert read_curves(tmp_path / "curves.csv").test_accuracy.tolist() == [0.1, 0.25, 0.1, 0.5]


def bytes_of_a_client(experiment, words, windows=False):
    """Return what all rounds send a client, one way, in the mean over clients and directions."""
    config = load_config(CONFIGS / f"{experiment.config}.yaml", [*experiment.overrides, *words])
    dataset = empty_dataset(config.data.name, **config.data.options)
    shares = config.keep_ratio if isinstance(config.keep_ratio, dict) else {config.keep_ratio: 1.0}
    plan = make_planner(config).plan(make_model(config, dataset), {r: r for r in shares})
    shards = {ratio: plan.shard(ratio) for ratio in shares}
    sizes = {r: (shard.nbytes + replace(shard, tail={}).nbytes) / 2 for r, shard in shards.items()}  # no tail returns
    if windows:
        sizes = {r: width.nbytes(width.narrow(config, dataset, most).state_dict()) for r, most in sizes.items()}
    return config.rounds * sum(share * sizes[ratio] for ratio, share in shares.items())


@pytest.mark.parametrize("on", beyond.EXPERIMENTS)
def test_every_method_is_valid_and_sends_no_more_bytes(on):
    experiment = beyond.EXPERIMENTS[on]
    for method, words in experiment.methods.items():
        if method in (beyond.BOUND, "dense, zero_init_last"):
            continue
        nbytes = bytes_of_a_client(experiment, words, windows=method == beyond.ROLLING)
        assert 0.25 < nbytes / bytes_of_a_client(experiment, experiment.methods[beyond.BASELINE]) <= 1.02, method


def test_arms_of_the_uneven_study_send_the_same_bytes():
    experiment = options.EXPERIMENTS["uneven"]
    of_each = {
        name: bytes_of_a_client(experiment.on, arm.overrides, windows=name in ("HeteroFL", "FedRolex"))
        for name, arm in experiment.arms.items()
    }
    assert max(of_each.values()) < 1.03 * min(of_each.values()), of_each


def test_command_with_invalid_arguments_prints_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command.main(["beyond", "--into", str(tmp_path / "file"), "--only"]) == 1
    assert "File exists" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["beyond", "--jobs", "-1"])
    assert "-1 is less than 1" in capsys.readouterr().err


def test_command_with_a_method_of_a_study_without_methods_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["uneven_clients", "--into", str(tmp_path), "--only", "ocs"])
    assert "uneven_clients runs all" in capsys.readouterr().err
    assert command.read(["beyond", "--seeds", "0", "1"]).command == "python -m studies beyond --seeds 0 1"


def test_command_with_a_method_of_another_experiment_is_refused(tmp_path, capsys):
    assert command.main(["beyond_shakespeare", "--into", str(tmp_path), "--only", "width, rolling"]) == 2
    assert "width, rolling" in capsys.readouterr().err


@pytest.mark.slow
def test_command_runs_each_method_once_and_writes_one_table(tmp_path):
    words = ["beyond", *TINY, "--into", str(tmp_path), "--only", "collective", "width, rolling", "--seeds", "0"]
    assert command.main(words) == 0
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(before) == 2
    assert len((tmp_path / "curves.csv").read_text(encoding="utf-8").splitlines()) == 1 + 2 * 2
    assert command.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == before
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text
    assert text.count("| 0 |") == 2
    assert "nan" not in text.lower()
