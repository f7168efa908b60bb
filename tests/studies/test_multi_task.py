"""The study of several models: its data are those published, and all of it runs."""

from dataclasses import replace

import numpy as np
import pytest

from sharding import UserError
from studies import curves, multi_task, runner
from studies.runner import Arguments
from train.report.frame import round_frame
from train.variants.multi_model import assemble_models

SENT = {"bytes_up": 10**6, "bytes_down": 10**7, "num_aggregated": 12}


@pytest.mark.parametrize("study", multi_task.STUDIES)
def test_multi_task_partition_gives_a_tenth_of_clients_half_the_data(study, tmp_path, drawn_data):
    config = multi_task.config_of(study, "loss", 0.1, 0, tmp_path, [f"data.root={drawn_data}"])
    tasks = assemble_models(config)
    assert len({task.config.seed for task in tasks.parts.values()}) == len(tasks.parts)
    for task in tasks.parts.values():
        sizes = np.array(list(task.num_samples.values()))
        large = len(sizes) // 10
        assert sizes[:large].min() > 2 * sizes[large:].max()
        assert sizes[:large].sum() / sizes.sum() == pytest.approx(0.526, abs=0.06)
        assert task.config.local.schedule.name == "constant"


def test_tuning_with_the_best_at_the_edge_extends_that_scheme_only(tmp_path, monkeypatch):
    peaks = {"uniform": 0.02}

    def lines(config):
        off = abs(
            np.log10(config.local.optimizer.options["lr"] / peaks.get(config.clients.sampler.options["signal"], 0.1))
        )
        return [{"test_accuracy": 0.9 - off / 10, "test_loss": 1.0, "round": 0, "three_a/num_clients": 12} | SENT]

    def run_all(configs, *_):
        return curves.evaluations(round_frame({name: lines(config) for name, config in configs.items()}))

    monkeypatch.setattr(runner, "run_all", run_all)
    runs, best = multi_task.train("multi_task", (0.03, 0.1, 0.3), (0, 1), Arguments("multi_task", tmp_path))
    assert best == dict.fromkeys(multi_task.STUDIES["multi_task"], 0.1) | {"uniform": 0.015}
    assert {*runs.signal[runs.step < 0.03]} == {"uniform"}
    table = multi_task.table("multi_task", runs, best)
    assert list(table)[:4] == ["signal", "step 0.0075", "step 0.015", "step 0.03"]
    assert list(table.iloc[0])[:5] == ["norm", "–", "–", "84.8 ± 0.0", "90.0 ± 0.0"]
    assert list(table.iloc[0])[-5:] == ["90.0", "+1.2 ± 0.0", "1.00", "10.00", "12"]


def test_curve_of_a_run_with_null_values_has_none(tmp_path):
    line = {"round": 0, "bytes_up": 1, "bytes_down": 2, "test_accuracy": 0.100000004, "test_loss": None}
    lines = [line, line | {"round": 1, "test_loss": 2.5}]
    rounds = round_frame({"a": [each | {"num_clients": 3, "num_aggregated": 3} for each in lines]})
    curves.write_curves(tmp_path / "curves.csv", curves.evaluations(rounds))
    read = curves.read_curves(tmp_path / "curves.csv")
    assert (read.test_accuracy[0], read.bytes_down[1], read.test_loss[1]) == (0.1, 4, 2.5)
    assert np.isnan(read.test_loss[0])


def test_curve_has_cumulative_costs_and_means_of_rounds():
    def line(t, **more):
        times = {"seconds": 2.0, "simulated_seconds": 0.5}
        return {"round": t, "train_loss": float(t), "improvement_alpha": t / 10} | times | SENT | more

    silent = line(1, num_aggregated=0, train_loss=None)
    tasks = {"a/num_clients": 3, "b/num_clients": 4, "num_clients": 5, "test_accuracy": 0.5, "train_set_loss": 2.0}
    lines = [line(0, num_clients=1), silent, *(line(t, num_clients=1) for t in range(2, 12)), line(12, **tasks)]
    (at,) = curves.evaluations(round_frame({"other": lines[:-1], "run": lines})).itertuples()
    assert (at.run, at.rounds, at.bytes_up, at.num_aggregated) == ("run", 13, 13 * 10**6, 12 * 12)
    assert (at.trained, at.seconds) == (11 + 7, 26.0)
    assert (at.simulated, at.train_set_loss) == (6.5, 2.0)
    assert at.train_loss == np.mean(range(3, 13))  # ten rounds
    assert at.alpha == pytest.approx(np.mean(range(13)) / 10)


def test_study_with_committed_curves_runs_only_missing_ones(tmp_path, monkeypatch):
    ran = []

    def run_all(wanted, *_):
        ran.extend(wanted)
        line = {"round": 0, "test_accuracy": len(ran) / 10, "test_loss": 1.0} | SENT
        return curves.evaluations(round_frame({name: [line] for name in wanted}))

    def accuracy(**changes):
        return runner.curves_of({"a": config}, replace(arguments, **changes)).test_accuracy.tolist()

    monkeypatch.setattr(runner, "run_all", run_all)
    config = multi_task.config_of("multi_task", "loss", 0.1, 0, tmp_path, [])
    arguments = Arguments("multi_task", tmp_path)
    with pytest.raises(UserError, match=r"curves\.csv has no curve of a; run the study"):
        accuracy(only=())
    assert [accuracy(), accuracy(), accuracy(only=())] == [[0.1]] * 3
    assert accuracy(overrides=("rounds=3",)) == [0.2]
    assert ran == ["a", "a"]


@pytest.mark.slow
def test_multi_task_study_of_two_rounds_runs(tmp_path, monkeypatch, drawn_data):
    monkeypatch.setattr(multi_task, "STEPS", (0.1,))
    few = "rounds=2", "evaluate_every=1", f"data.root={drawn_data}"
    multi_task.run(Arguments("multi_task", tmp_path, few, seeds=(0,)))
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "nan" not in text.lower()
    assert text.count("| full |") == 2
    assert (tmp_path / "multi_task.png").exists()
