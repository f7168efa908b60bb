"""The study of several models: its data are those published, and all of it runs."""

from dataclasses import replace
from math import isnan

import numpy as np
import pytest

from studies import curves, multi_task, runner
from studies.runner import Arguments
from train.multi_model import assemble_models

SENT = {"bytes_up": 10**6, "bytes_down": 10**7, "heard": 12}


@pytest.mark.parametrize("study", multi_task.STUDIES)
def test_the_same_tenth_of_the_clients_has_half_of_each_models_data(study, tmp_path, drawn_data):
    config = multi_task.cell(study, "loss", 0.1, 0, tmp_path, [f"data.root={drawn_data}"])
    tasks = assemble_models(config)
    assert len({experiment.config.seed for experiment in tasks.parts.values()}) == len(tasks.parts)
    for experiment in tasks.parts.values():
        sizes = np.array(list(experiment.num_samples.values()))
        large = len(sizes) // 10
        assert sizes[:large].min() > 2 * sizes[large:].max()
        assert sizes[:large].sum() / sizes.sum() == pytest.approx(0.526, abs=0.06)
        assert experiment.config.local.schedule == "constant"


def test_a_scheme_that_is_best_at_the_edge_goes_beyond_it_alone(tmp_path, monkeypatch):
    peaks = {"uniform": 0.02}

    def lines(config):
        off = abs(np.log10(config.local.lr / peaks.get(config.clients.signal, 0.1)))
        return [{"test_accuracy": 0.9 - off / 10, "test_loss": 1.0, "round": 0, "three_a/clients": 12} | SENT]

    monkeypatch.setattr(runner, "run_all", lambda its, *_: {name: lines(one) for name, one in its.items()})
    runs, best = multi_task.train("multi_task", (0.03, 0.1, 0.3), (0, 1), Arguments("multi_task", tmp_path))
    assert best == dict.fromkeys(multi_task.STUDIES["multi_task"], 0.1) | {"uniform": 0.015}
    assert {signal for signal, step in runs if step < 0.03} == {"uniform"}
    head, _, norm, *_ = table = multi_task.table("multi_task", runs, best).splitlines()
    assert head.startswith("| signal | step 0.0075 | step 0.015 | step 0.03 |")
    assert norm.startswith("| norm | – | – | 84.8 ± 0.0 | 90.0 ± 0.0 |")
    assert "| 90.0 | 1.2 ± 0.0 | 1.00 |" in norm
    assert len({row.count("|") for row in table}) == 1


def test_what_a_run_wrote_as_no_number_is_none_in_its_curve(tmp_path):
    line = {"round": 0, "bytes_up": 1, "bytes_down": 2, "heard": 3, "test_accuracy": 0.100000004, "test_loss": None}
    curve = curves.Evaluation.of_run([line, line | {"test_loss": 2.5}])
    curves.write_curves(tmp_path / "curves.csv", {"a": curve})
    first, second = curves.read_curves(tmp_path / "curves.csv")["a"]
    assert (first.test_accuracy, second.bytes_down, second.test_loss) == (0.1, 4, 2.5)
    assert isnan(first.test_loss)


def test_a_curve_has_what_was_spent_and_the_means_of_its_rounds():
    def line(t, **more):
        times = {"seconds": 2.0, "simulated_seconds": 0.5}
        return {"round": t, "train_loss": float(t), "improvement_alpha": t / 10} | times | SENT | more

    silent = line(1, heard=0, train_loss=None)
    tasks = {"a/clients": 3, "b/clients": 4, "clients": 5, "test_accuracy": 0.5, "train_set_loss": 2.0}
    lines = [line(0, clients=1), silent, *(line(t, clients=1) for t in range(2, 12)), line(12, **tasks)]
    (at,) = curves.Evaluation.of_run(lines)
    assert (at.rounds, at.bytes_up, at.heard, at.trained, at.seconds) == (13, 13 * 10**6, 12 * 12, 11 + 7, 26.0)
    assert (at.simulated, at.train_set_loss) == (6.5, 2.0)
    assert at.train_loss == np.mean(range(3, 13))  # ten rounds
    assert at.alpha == pytest.approx(np.mean(range(13)) / 10)


def test_what_is_in_the_file_is_not_run_again_and_overrides_are_distinguished(tmp_path, monkeypatch):
    ran = []

    def run_all(wanted, *_):
        ran.extend(wanted)
        line = {"round": 0, "test_accuracy": len(ran) / 10, "test_loss": 1.0} | SENT
        return {name: [line] for name in wanted}

    monkeypatch.setattr(runner, "run_all", run_all)
    config, arguments = multi_task.cell("multi_task", "loss", 0.1, 0, tmp_path, []), Arguments("multi_task", tmp_path)
    first = runner.curves_of({"a": config}, arguments)
    assert runner.curves_of({"a": config}, arguments)["a"][-1].test_accuracy == first["a"][-1].test_accuracy
    other = runner.curves_of({"a": config}, replace(arguments, overrides=("rounds=3",)))
    assert ran == ["a", "a"]
    assert (first["a"][-1].test_accuracy, other["a"][-1].test_accuracy) == (0.1, 0.2)


@pytest.mark.slow
def test_the_study_in_two_rounds(tmp_path, monkeypatch, drawn_data):
    monkeypatch.setattr(multi_task, "STEPS", (0.1,))
    few = "rounds=2", "evaluate_every=1", f"data.root={drawn_data}"
    multi_task.run(Arguments("multi_task", tmp_path, few, seeds=(0,)))
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "nan" not in text.lower()
    assert text.count("| full |") == 2
    assert (tmp_path / "multi_task.png").exists()
