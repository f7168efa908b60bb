"""The studies of uploads: step sizes are tuned by the published rule, tables say what runs did, and all of it runs."""

import shutil
from dataclasses import replace
from math import nan

import numpy as np
import pytest

from studies import uploads
from studies.curves import by_scheme
from studies.picture import draw
from studies.runner import Arguments
from studies.upload_studies import UPLOADS
from studies.uploads import Arm, Results
from train.experiment.assembly import assemble
from train.report.text import frame_table


@pytest.mark.parametrize("peak", [2.0**-8, 2.0**-5, 2.0**-3, 2.0**-1, 2.0**2])
def test_tuning_grid_extends_until_the_best_is_inside(peak):
    tried = []

    def score(wanted):
        tried.extend(wanted["a"])
        return {"a": {step: -abs(np.log2(step / peak)) for step in wanted["a"]}}

    assert uploads.search(["a"], uploads.GRID, score) == {"a": peak}
    assert len(tried) == len(set(tried))
    assert min(tried) <= peak / 2
    assert max(tried) >= 2 * peak
    assert min(min(uploads.GRID), peak / 2) == min(tried)
    assert max(max(uploads.GRID), peak * 2) == max(tried)
    assert uploads.search(["a"], (0.25,), score) == {"a": 0.25}, "a grid of one value is no search"


def test_tuning_with_a_diverging_step_size_continues(tmp_path, started, drawn_data):
    study = replace(UPLOADS["uneven_clients"], holdout=200)
    quick = [f"data.root={drawn_data}", "rounds=8", "evaluate_every=4", "clients.count=60", "clients.per_round=6"]
    few = replace(study.comparisons[0], arms=(Arm("full"), Arm("uniform", 3)))
    arguments = Arguments("uneven_clients", tmp_path, (*quick, "model.widths=[2, 2]"))
    steps = uploads.tune(study, few, arguments, (0.125, 1e20))
    assert max(steps.values()) < 1
    lost = [path for path in tmp_path.rglob("metrics.jsonl") if len(path.read_text().splitlines()) < 8]
    assert any("lr1e+20" in str(path) for path in lost)
    assert any("lr1e+20" in name for name in started)


@pytest.mark.parametrize(("index", "share", "data"), [(0, 0.1, 0.82), (1, 0.2, 0.90), (2, 0.5, 0.98)])
def test_large_clients_have_the_published_share_of_the_data(index, share, data, tmp_path, drawn_data):
    study = UPLOADS["uneven_clients"]
    comparison = study.comparisons[index]
    experiment = assemble(
        study.config_of(comparison, comparison.arms[1], 0.125, 0, tmp_path, [f"data.root={drawn_data}"])
    )
    sizes = np.array(list(experiment.num_samples.values()))
    assert (sizes == 380).mean() == share
    assert sizes[sizes == 380].sum() / sizes.sum() == pytest.approx(data, abs=0.006)


def test_budget_of_byte_sampling_is_three_average_shards(tmp_path, drawn_data):
    study = UPLOADS["joint_sampling"]
    (comparison,) = study.comparisons
    experiment = assemble(
        study.config_of(comparison, comparison.arms[1], 0.125, 0, tmp_path, [f"data.root={drawn_data}"])
    )
    costs = experiment.sampler.population.costs
    assert comparison.arms[1].budget == pytest.approx(3 * costs.mean(), rel=0.01)
    assert (costs.min(), costs.max()) == (pytest.approx(0.21, abs=0.005), pytest.approx(0.53, abs=0.005))


def test_arm_of_full_participation_at_the_step_of_ocs_is_equal():
    alike = Arm(uploads.ALIKE)
    assert alike.overrides == Arm("full").overrides
    assert (alike.tuned, Arm("AOCS", 3).tuned, Arm("full").tuned) == ("OCS", "OCS", "full")


def results(curves_of, arm, step, *accuracies, bytes_up=10**5):
    """Return the results of an arm whose runs, one for each seed, had these accuracies round by round."""
    runs = {
        f"{arm.name}-{seed}": [
            {"bytes_up": t * bytes_up, "bytes_down": t * 10**6, "test_accuracy": a, "train_loss": 1.0}
            for t, a in enumerate(curve, start=1)
        ]
        for seed, curve in enumerate(accuracies)
    }
    return Results(arm, step, 3, range(len(accuracies)), by_scheme(curves_of(runs)))


def test_uploads_table_row_equals_the_results_of_its_runs(curves_of):
    steps = {"full": 0.125, "OCS": 0.25, "uniform": 0.5}
    full = results(curves_of, Arm("full"), 0.5, [0.1, 0.6, 0.7], [0.6, 0.6, 0.9], bytes_up=10**6)
    ocs = results(curves_of, Arm("OCS", 3), 0.25, [0.1, 0.2, 0.5], [0.1, 0.1, 0.1])
    lost = results(curves_of, Arm("uniform", 3), 1.0, [0.1, 0.6, 0.7], [0.6])
    none = results(curves_of, Arm("OCS", 3), 1.0, [0.1], [])
    table = frame_table(uploads.table([0.5], steps, [full, ocs, lost, none]))
    _, _, first, second, third, fourth = table.splitlines()
    assert first == "| full | 1/2 (1/8) | 2 ± 1 | 12 ± 6 | 1.00 | 80.0 ± 14.1 | 1.000 ± 0.000 | – | 24 ± 11 |"
    assert second.startswith("| OCS, m = 3 | 1/4 (1/4) | 3 (1 never) | 2 (1 never) | 0.15 | 30.0 ± 28.3 |")
    assert second.endswith("| – | 26 (1 never) |"), "downloads of 8 Mbit a round, and uploads of a tenth of it"
    assert third.startswith("| uniform, m = 3 | 1 (1/2) | 2 ± 1 | 1 ± 1 | 0.10 | 70.0 (1 diverged) | 1.000 | – |")
    assert fourth.endswith("| never | never | – | diverged | – | – | never |")


def test_uploads_figure_has_accuracies_and_lowest_losses(curves_of):
    accuracies, losses = (0.1, 0.3, 0.2, 0.6), (nan, 2.0, 3.0, 0.5)
    course = [{"test_accuracy": a, "train_loss": loss} for a, loss in zip(accuracies, losses, strict=True)]
    curves = curves_of({"OCS-0": course})
    curves = curves.assign(scheme="OCS", megabits=8 * curves.rounds)
    figure = draw(curves, {"rounds": "rounds", "bits": "megabits"}, "title", [0.5], rows=2)
    above, _, below, right = figure.axes[:4]
    np.testing.assert_allclose(above.lines[0].get_ydata(), [10, 30, 20, 60])
    assert list(right.lines[0].get_ydata()) == [2.0, 2.0, 0.5]
    assert list(right.lines[0].get_xdata()) == [16, 24, 32]
    assert [axes.get_yscale() for axes in (above, below, right)] == ["linear", "log", "log"]
    assert [axes.get_xscale() for axes in (above, below, right)] == ["linear", "linear", "log"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "count", "few"),
    [
        ("uneven_clients", "mnist", 7, ("clients.count=60", "model.widths=[2, 2]")),
        ("shakespeare_uploads", "shakespeare", 7, ("model.width=8",)),
        ("joint_sampling", "mnist", 5, ("clients.count=60",)),
        ("cifar100_uploads", "cifar100", 4, ("model.widths=[2, 2]",)),
    ],
)
def test_uploads_study_of_a_few_rounds_runs(name, data, count, few, tmp_path, monkeypatch, started, real_data):
    real_data(data)
    monkeypatch.setattr(uploads, "GRID", (0.125,))
    study = replace(UPLOADS[name], comparisons=UPLOADS[name].comparisons[:1])
    arguments = Arguments(name, tmp_path, ("rounds=2", "evaluate_every=1", *few), seeds=(0,))
    uploads.run(study, arguments)
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    for folder in (tmp_path, tmp_path / "tuning"):
        shutil.rmtree(folder / "runs")
    uploads.run(study, arguments)  # only of the curves
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert "nan" not in text.lower()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == count
    assert {row.count("|") for row in rows} == {rows[0].count("|")}
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert len((tmp_path / "curves.csv").read_text().splitlines()) > len(rows)
