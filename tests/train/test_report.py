"""The page about runs that exist, and what it is made of."""

import csv
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sharding import STRATEGIES, UserError
from train.cli.commands import main
from train.config.schema import load_config, merge
from train.config.yaml_text import dump_yaml, parse_yaml
from train.report.figures import accuracy_drawings, curve_drawings, grid_drawing, legend_drawing
from train.report.frame import Runs, cost_to, find_runs, mean_curve, read_runs, round_frame
from train.report.groups import choose_targets, format_cost, group_runs, without_repeats
from train.report.page import write_page
from train.report.plots import STYLES, style_of
from train.report.summary import write_report
from train.run import run
from train.rundir.directory import check_reports

pytestmark = pytest.mark.usefixtures("undrawn")
TINY = [
    *("rounds=2", "evaluate_every=1", "clients.count=20", "clients.per_round=3", "local.epochs=1"),
    *("model={name: mlp, hidden: [16, 16]}", "network.bandwidth=10", "alignment=true"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two strategies, one of them with two seeds, of a model and a clock so small that it takes a second."""
    into = tmp_path_factory.mktemp("runs")
    for name, overrides in {
        "a": ["seed=0"],
        "b": ["seed=1"],
        "c": ["strategy=dense", "server_optimizer.lr=0.5"],
    }.items():
        run(load_config("tests/quickstart.yaml", [*TINY, *overrides, f"output={into / name}"]))
    return into


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """The page and the table about them."""
    return write_page([runs], tmp_path_factory.mktemp("page"), "python -m train report runs", targets=[0.01, 0.999])


def copied(run, into, **values):
    """Copy a run into a folder, with other values in each line of its metrics; return where."""
    metrics = shutil.copytree(run, into / run.name) / "metrics.jsonl"
    lines = [json.loads(line) | values for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return metrics.parent


def page_of(folder):
    """Return the text of the page about the runs in a folder, which is written there, with empty pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.report.page.svg_of", lambda figure: b"")
        return write_page([folder], folder, "x")[0].read_text(encoding="utf-8")


def test_report_page_has_all_sections(written):
    page, _ = written
    text = page.read_text(encoding="utf-8")
    for caption in ("Test accuracy against simulated seconds", "π of the terms of", "ω of the terms of", "by phase"):
        assert caption in text, caption
    for key in ("data.partition", "dirichlet", "server_optimizer.lr", "torch", "commit", "collective, lr=0.4"):
        assert key in text, key
    headings = ["Results", "Accuracy", "Bytes to a target", "What was sent", "Clients", "Time", "Lost clients"]
    assert re.findall("<h2[^>]*>(.*?)</h2>", text) == [*headings, "Configuration", "Versions"]
    assert text.count("<figure>") == text.count("<img alt=") >= 12
    plain = re.sub(r"data:image[^\"]*", "", text)
    assert not re.search("http|<script", plain), "the page needs no network, and runs nothing"


def test_report_table_has_a_row_per_run(written):
    _, table = written
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["strategy"], row["seed"]) for row in rows] == [
        ("collective", "0"),
        ("collective", "1"),
        ("dense", "0"),
    ]
    for row in rows:
        last = [json.loads(line) for line in (Path(row["directory"]) / "metrics.jsonl").read_text().splitlines()]
        assert float(row["test_accuracy"]) == last[-1]["test_accuracy"]
        assert float(row["megabytes"]) == pytest.approx(
            sum(line["bytes_down"] + line["bytes_up"] for line in last) / 1e6
        )
        assert float(row["megabytes_to_1"]) == pytest.approx((last[0]["bytes_down"] + last[0]["bytes_up"]) / 1e6)
        assert row["megabytes_to_99.9"] == ""


def test_report_of_an_unfinished_run_warns(runs, tmp_path):
    metrics = copied(runs / "a", tmp_path) / "metrics.jsonl"
    first, second = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + second[: len(second) // 2])  # as while it is being written
    assert "has 1 of 2 rounds" in page_of(tmp_path)


def test_report_of_a_diverged_run_warns(runs, tmp_path):
    copied(runs / "a", tmp_path, num_aggregated=0, num_failed=4)
    warning = f"{tmp_path / 'a'} has 2 of 2 rounds: the last rounds had no usable update"
    assert f'<p class="warn">{warning}' in page_of(tmp_path)


def test_report_of_a_run_stopped_early_has_the_reason(runs, tmp_path):
    copied(runs / "a", tmp_path)
    metrics = copied(runs / "b", tmp_path, stopped="test accuracy 12.0 % has reached 0.1") / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    text = page_of(tmp_path)
    assert '<p class="note">' + f"{tmp_path / 'b'} has 1 of 2 rounds: test accuracy 12.0 % has reached 0.1.</p>" in text
    assert "cut off" not in text
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path, "both", "x")
    assert "the last of 1–2 rounds" in (tmp_path / "summary.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "spoiled", [{"bytes_up": None}, {"test_accuracy": 1e308}, {"seconds_plan": []}, {"failures": 1}, {"bytes_dense": 0}]
)
def test_report_with_invalid_metrics_leaves_the_run_out(runs, tmp_path, caplog, spoiled):
    copied(runs / "a", tmp_path)
    metrics = copied(runs / "b", tmp_path, **spoiled) / "metrics.jsonl"
    all_runs, unread = find_runs([tmp_path])
    assert [Path(run).name for run in all_runs.results.index] == ["a"]
    assert str(metrics) in unread[0]
    assert str(metrics) in caplog.text


@pytest.mark.parametrize("spoiled", [{1: 2}, {"local": {1: 2}}, {"rounds": "x"}])
def test_report_with_an_invalid_configuration_leaves_the_run_out(runs, tmp_path, spoiled):
    copied(runs / "a", tmp_path)
    config = copied(runs / "b", tmp_path) / "config.yaml"
    config.write_text(dump_yaml(parse_yaml(config.read_text()) | spoiled))
    all_runs, unread = find_runs([tmp_path])
    assert [Path(run).name for run in all_runs.results.index] == ["a"]
    assert f"{tmp_path / 'b'} holds no run that can be read" in unread[0]


ENTRY = {"keep_ratio": 0.2, "anme": None, "magnitudes": [1.0], "inclusion": [1.0], "multipliers": [1.0], "draws": [1]}
CLIENTS = {"samples": [3], "keep_ratios": [0.2], "classes": [[1, 2]]}
MADE = {"engine": "auto", "threads": 1, "device": "cpu", "data": {}, "starts": []}


def clients_with(wrong):
    return json.dumps({"quickstart": CLIENTS | wrong})


def layers_with(wrong, round=0):
    return json.dumps({"round": round, "layers": {"a": [ENTRY | wrong]}})


SIDE_FILES = {
    "too many samples": ("clients.json", clients_with({"samples": [1e308]}), "cannot read"),
    "samples of others": ("clients.json", clients_with({"samples": [1, 2]}), "cannot read"),
    "classes of no client": ("clients.json", clients_with({"classes": [1]}), "cannot read"),
    "words for inclusion": ("layers.jsonl", layers_with({"inclusion": ["x"]}), "cannot be read"),
    "no draws": ("layers.jsonl", layers_with({"draws": None}), "cannot be read"),
    "a word for a round": ("layers.jsonl", layers_with({}, round="x"), "cannot be read"),
    "no layers": ("layers.jsonl", '{"round": 0, "layers": {}}', "have no layers.jsonl"),
    "a start that is a number": ("provenance.json", json.dumps(MADE | {"starts": [1]}), "cannot read"),
    "deep": ("provenance.json", "[" * 100_000, "provenance.json: it is nested too deeply"),
}


@pytest.mark.parametrize(("name", "content", "told"), SIDE_FILES.values(), ids=SIDE_FILES)
def test_report_with_an_invalid_side_file_still_has_a_page(runs, tmp_path, name, content, told):
    shutil.copytree(runs / "a", tmp_path / "a")
    (tmp_path / "a" / name).write_text(f"{content}\n")
    assert told in page_of(tmp_path)


def test_report_name_with_dollars_is_plain_text(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "a")
    write_report([tmp_path / "a"], tmp_path, "cost $5 {vs $6", "x")
    groups = [replace(group, strategy="$a {$") for group in group_runs(find_runs([tmp_path])[0])]
    for drawing in accuracy_drawings(groups, []):
        drawing.figure.draw_without_rendering()


def test_report_of_a_grid_has_a_column_per_key_and_the_best_point(runs, tmp_path):
    directories = [copied(runs / name, tmp_path, test_accuracy=share) for name, share in (("a", 0.5), ("c", 0.75))]
    table, _ = write_report(directories, tmp_path, "grid", "x")
    assert table.caption == "Best: dense, lr=0.5, 75.0 %."
    assert not (tmp_path / "grid.png").exists(), "one point a strategy is no line"
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert f"\n\n{table.caption}\n" in text
    assert "| strategy | lr | test accuracy |" in text
    assert "| dense | 0.5 | 75.0 % |" in text


def test_report_of_a_numeric_grid_has_a_figure(runs, tmp_path):
    directories = [shutil.copytree(runs / "a", tmp_path / str(index)) for index in range(4)]
    for index, directory in enumerate(directories):
        config = parse_yaml((directory / "config.yaml").read_text())
        config["local"]["optimizer"]["lr"], config["design"] = (0.01, 0.1)[index % 2], ("cps", "brewer")[index // 2]
        (directory / "config.yaml").write_text(dump_yaml(config))
    groups = group_runs(read_runs(directories)[0])
    axes = grid_drawing(groups).figure.axes[0]
    assert (axes.get_xlabel(), axes.get_xscale()) == ("lr", "log")
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == [
        f"collective, design={design}" for design in ("cps", "brewer")
    ]
    _, paths = write_report(directories, tmp_path, "grid", "x")
    assert [path.name for path in paths[-2:]] == ["grid.png", "grid.svg"]


def test_report_has_remarks_on_the_data_below_each_table(runs, tmp_path):
    one = shutil.copytree(runs / "a", tmp_path / "a")
    made = one / "provenance.json"
    provenance = json.loads(made.read_text())
    made.write_text(json.dumps(provenance | {"data": {"quickstart": ["a lossy re-encoding (WebP)"]}}))
    table, _ = write_report([one], tmp_path, "one", "x")
    for text in (table.caption, (tmp_path / "summary.md").read_text(encoding="utf-8"), page_of(tmp_path)):
        assert "The data are not the official ones: a lossy re-encoding (WebP)." in text


def test_summary_lists_each_command_once(runs, tmp_path):
    one = shutil.copytree(runs / "a", tmp_path / "a")
    for command in ("train 'x --> y'", "train z", "train z --resume"):
        write_report([one], tmp_path, "one", command)
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert re.findall("Made by `(.*)`", text) == ["train 'x --> y'", "train z"]
    assert text.splitlines()[0].count("-->") == 1
    for own in (text, ""):  # a full disk leaves an empty one
        (tmp_path / "summary.md").write_text(own)
        check_reports(tmp_path)
    (tmp_path / "summary.md").write_text(text.replace('["train', '["train" train'))  # edited by hand
    write_report([one], tmp_path, "one", "train w")
    assert "Made by `train w`" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    (tmp_path / "summary.md").write_text(text.partition("\n")[2])
    with pytest.raises(UserError, match=r"summary\.md was not written by this program"):
        check_reports(tmp_path)


@pytest.mark.parametrize(("accuracy", "price"), [(0.04, None), (0.16, "MB to 15 %")])
def test_report_has_bytes_to_target_where_reached(runs, tmp_path, accuracy, price):
    write_report([copied(runs / "a", tmp_path, test_accuracy=accuracy)], tmp_path, "one", "x")
    (head,) = (
        line for line in (tmp_path / "summary.md").read_text(encoding="utf-8").splitlines() if "| strategy |" in line
    )
    assert ("MB to" in head) == (price is not None)
    assert price is None or head.endswith(f"| {price} |")


def test_report_inclusion_is_that_of_the_last_record_of_each_run(runs, tmp_path):
    for name in "ac":
        shutil.copytree(runs / ("b" if name == "c" else "a"), tmp_path / name)
    (tmp_path / "c" / "config.yaml").write_text((runs / "b" / "config.yaml").read_text().replace("clip: 10", "clip: 9"))
    layers = tmp_path / "c" / "layers.jsonl"
    layers.write_text(layers.read_text().splitlines(keepends=True)[0])
    text = page_of(tmp_path)
    assert "<th>collective, clip=9.0 (round 1)</th>" in text


def test_report_accepts_relative_and_absolute_folders(runs, tmp_path, monkeypatch):
    for name in ("here", "there"):
        shutil.copytree(runs / "a", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "here", str(tmp_path / "there")]) == 0
    assert (tmp_path / "report.html").exists()


def test_report_counts_each_seed_once_and_names_omitted_runs(runs, tmp_path):
    for name in ("a", "b", "half", "older"):
        shutil.copytree(runs / ("b" if name == "b" else "a"), tmp_path / name)
    metrics = tmp_path / "half" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    os.utime(tmp_path / "older" / "metrics.jsonl", (0, 0))
    kept, left_out = without_repeats(find_runs([tmp_path])[0])
    assert [Path(run).name for run in kept.results.index] == ["a", "b"]
    assert [(Path(run).name, Path(instead).name) for run, instead in left_out] == [("half", "a"), ("older", "a")]
    assert f"half is left out: {tmp_path / 'a'} has the same settings and seed." in page_of(tmp_path)
    assert len((tmp_path / "report.csv").read_text(encoding="utf-8").splitlines()) == 3


def test_report_counts_failed_clients_by_reason(runs, tmp_path):
    copied(runs / "a", tmp_path, num_failed=1, failures={"7": "a <NaN> in u"})
    text = page_of(tmp_path)
    assert "<td>a &lt;NaN&gt; in u</td><td>2</td>" in text


def test_report_does_not_overwrite_other_files(runs, written, tmp_path):
    for path in written:
        shutil.copy(path, tmp_path)
    write_page([runs / "a"], tmp_path, "x")  # its own, it may
    (tmp_path / "report.csv").write_text("mine")
    with pytest.raises(UserError, match="not written by this program"):
        write_page([runs], tmp_path, "x")


def test_report_figure_with_an_exploded_loss_shows_the_others(runs, tmp_path):
    copied(runs / "a", tmp_path)
    metrics = copied(runs / "b", tmp_path) / "metrics.jsonl"
    first, last = metrics.read_text().splitlines()
    metrics.write_text(f"{first}\n{json.dumps(json.loads(last) | {'train_loss': 1e20})}\n")
    (drawing,) = curve_drawings(group_runs(find_runs([tmp_path])[0]), "train_loss", "Training loss", "The loss.")
    assert drawing.figure.axes[0].get_ylim()[1] < 100
    assert "diverged" in drawing.caption


def test_long_labels_fit_the_legend(runs):
    label = "prism_wallenius_clip, " + ", ".join(f"local.setting_{number}=0.03" for number in range(6))
    groups = [replace(group, strategy=label, varied={}) for group in group_runs(find_runs([runs])[0])]
    figure = legend_drawing(groups).figure
    figure.draw_without_rendering()
    extents = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert all(box.x1 < figure.bbox.x1 and box.y1 < figure.bbox.y1 for box in extents)


def spoil(run, line):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(line)
    return f"{run / 'metrics.jsonl'}, line {len((run / 'metrics.jsonl').read_text().splitlines())}, is not"


def test_report_with_unreadable_runs_names_them_and_shows_the_others(runs, tmp_path, caplog):
    for name in "abc":
        shutil.copytree(runs / name, tmp_path / name)
    spoiled = spoil(tmp_path / "a", "garbage\n")
    (tmp_path / "b" / "metrics.jsonl").write_text("")
    lost = spoil(tmp_path / "b", "{}\n")
    layers = tmp_path / "a" / "layers.jsonl"
    layers.write_text(layers.read_text() + "garbage\n")
    clients = tmp_path / "a" / "clients.json"
    clients.write_text("garbage")
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for words in (
        f"{spoiled} the metrics of round 3; only the rounds before it are shown",
        f"{lost} the metrics of round 1",
    ):
        assert words in page
        assert words in caplog.text
    assert f"cannot read {clients}: " in page
    assert len((tmp_path / "report.csv").read_text().splitlines()) == 3


def test_report_without_a_readable_run_is_an_error(runs, tmp_path, capsys):
    shutil.copytree(runs / "a", tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    spoiled = spoil(tmp_path / "a", "garbage\n")
    assert main(["report", str(tmp_path)]) == 2
    assert spoiled in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def configured(run, into, name, **changes):
    """Copy a run into a folder under a name, with other keys in its configuration; return where."""
    directory = shutil.copytree(run, into / name)
    config = parse_yaml((directory / "config.yaml").read_text())
    (directory / "config.yaml").write_text(dump_yaml(merge(config, changes)))
    return directory


def test_group_of_runs_that_differ_in_paths_is_one_arm(runs, tmp_path):
    elsewhere = {"plugins": ["mine"], "data": {"root": "/there", "download": True}, "seed": 1}
    other = configured(runs / "a", tmp_path, "other", **elsewhere)
    (group,) = group_runs(read_runs([runs / "a", other])[0])
    assert group.label == "collective"


def test_group_of_another_order_of_keep_ratios_is_another_experiment(runs, tmp_path):
    orders = ({"0.2": 0.5, "0.4": 0.5}, {"0.4": 0.5, "0.2": 0.5})
    both = [configured(runs / "a", tmp_path, str(index), keep_ratio=order) for index, order in enumerate(orders)]
    kept, left_out = without_repeats(read_runs(both)[0])
    assert (list(kept.results.index), left_out) == ([str(path) for path in both], [])
    assert len(group_runs(kept)) == 2


def test_group_joins_seeds_and_labels_the_differences(runs, tmp_path):
    assert [(group.label, len(group.results)) for group in group_runs(find_runs([runs])[0])] == [
        ("collective, lr=0.4", 2),
        ("dense, lr=0.5", 1),
    ]
    other = configured(runs / "a", tmp_path, "other", local={"optimizer": {"lr": 0.7}})
    first, second = group_runs(read_runs([runs / "a", other])[0])
    assert (first.label, second.label) == ("collective, lr=0.02", "collective, lr=0.7")
    assert first.style.color != second.style.color, "where all have one strategy, a color is a group's"
    colors = {group.style.color for group in group_runs(read_runs([runs / "a", other, runs / "c"])[0])}
    assert len(colors) == 3, "a color for each group where a strategy repeats"


def test_report_has_a_section_per_experiment(runs, tmp_path):
    for name in "abc":
        shutil.copytree(runs / name, tmp_path / name)
    config = tmp_path / "c" / "config.yaml"
    config.write_text(config.read_text().replace("name: quickstart", "name: $other {$", 1))
    text = page_of(tmp_path)
    assert re.findall(r'<h1 id="experiment-(.)">(.*)</h1>', text) == [("1", "quickstart"), ("2", "$other {$")]
    assert len(re.findall(r'<h2 id="results-.">', text)) == 2
    labels = re.findall(r"</span>([^<]*)</td><td>\d+\.\d", text)  # in the tables of results and of times
    assert labels == ["collective", "collective", "dense", "dense"]
    assert len((tmp_path / "report.csv").read_text(encoding="utf-8").splitlines()) == 4


def test_labels_of_many_settings_are_short_and_numbered(runs, tmp_path):
    keys = {"design": "brewer", "rounds": 7, "keep_ratio": 0.3}
    many = [
        configured(runs / "a", tmp_path, name, **keys, compression=name, alignment=False)
        for name in ("int8", "bfloat16")
    ]
    assert [group.label for group in group_runs(read_runs([runs / "a", *many])[0])] == [
        "collective, rounds=2, design=cps, keep_ratio={'0.2': 0.6, '0.4': 0.4}",
        "collective (1), rounds=7, design=brewer, keep_ratio=0.3",
        "collective (2), rounds=7, design=brewer, keep_ratio=0.3",
    ]


def measured(**accuracies):
    """Return the rounds of runs that move 4 MB a round, with these test accuracies; None: not evaluated."""
    return round_frame(
        {
            run: [
                {"round": t, "bytes_total": 4e6 * (t + 1)} | ({} if share is None else {"test_accuracy": share})
                for t, share in enumerate(shares)
            ]
            for run, shares in accuracies.items()
        }
    )


def test_choose_targets_uses_reached_accuracies(runs):
    groups = group_runs(find_runs([runs])[0])

    def targets(*curves):
        return choose_targets([replace(groups[0], rounds=measured(run=curve)) for curve in curves])

    assert targets([0.2, None, 0.34], [0.61, 0.6]) == [0.3, 0.45, 0.6]
    assert targets([0.949], [0.999]) == [0.9, 0.95], "one group's best is below 95 %, and all are below 100 %"
    assert targets([0.04], [0.06]) == [0.05], "0 is no target"
    assert choose_targets([]) == []
    alternating = measured(even=[0.9, None, 0.9, None], odd=[None, 0.9, None, 0.9])
    assert choose_targets([replace(groups[0], rounds=alternating)]) == [], "no round in common"


def test_cost_to_a_target_is_the_bytes_until_the_first_evaluation(runs):
    rounds = measured(fast=[None, 0.5, 0.7, 0.6], slow=[None, 0.5, None, 0.7, 0.6])
    assert cost_to(rounds, 0.5).tolist() == [8e6, 8e6]
    assert cost_to(rounds, 0.501).tolist() == cost_to(rounds, 0.7).tolist() == [12e6, 16e6]
    assert cost_to(rounds, 0.7, "rounds").tolist() == [3, 4]
    assert cost_to(rounds, 0.71).isna().all()
    group = group_runs(find_runs([runs])[0])[0]
    both = replace(group, rounds=rounds)
    assert (format_cost(both, 0.5), format_cost(both, 0.71)) == ("8.0 ± 0.0", "never")
    assert format_cost(both, 0.7) == f"14.0 ± {8**0.5:.1f}"
    never = replace(group, rounds=measured(fast=[None, 0.5, 0.7, 0.6], slow=[None, 0.5]))
    assert format_cost(never, 0.7) == "12.0 (1 of 2 seeds never)"


def test_mean_curve_is_over_rounds_of_all_seeds():
    shares = pd.DataFrame(
        {
            "run": [*"aaabbbc"],
            "rounds": [1, 2, 3, 1, 2, 3, 1],
            "x": [1.0, 2.0, 3.0, 3.0, 4.0, 5.0, 9.0],
            "y": [10.0, 20.0, float("nan"), 14.0, 20.0, 30.0, float("inf")],
        }
    )
    curve = mean_curve(shares, "y", "x")
    assert (curve.x.tolist(), curve["mean"].tolist()) == ([2.0, 3.0], [12.0, 20.0])
    assert curve.deviation.tolist() == pytest.approx([8**0.5, 0.0])
    assert curve.runs.tolist() == [2, 2]
    assert mean_curve(shares[:1], "y", "rounds").deviation.tolist() == [0.0]
    assert mean_curve(shares[:0], "y").empty
    assert mean_curve(shares, "z").empty


def test_frames_have_a_row_per_round_and_per_run(runs):
    all_runs, errors = find_runs([runs])
    assert (errors, len(all_runs.rounds), list(all_runs.rounds.columns[:2])) == ([], 6, ["run", "round"])
    assert all_runs.settings["local.optimizer.lr"].tolist() == [0.02] * 3
    moved = (all_runs.rounds.bytes_down + all_runs.rounds.bytes_up).groupby(all_runs.rounds.run).sum()
    last = all_runs.rounds.groupby("run").tail(1).set_index("run")
    assert last.bytes_total.equals(moved)
    assert (all_runs.results.megabytes * 1e6).tolist() == pytest.approx(moved.tolist())
    assert all_runs.results.test_accuracy.equals(last.test_accuracy)
    assert all_runs.results.best_accuracy.equals(all_runs.rounds.groupby("run").test_accuracy.max())
    assert all_runs.results.num_rounds.tolist() == [2, 2, 2]
    assert all_runs.results.is_finished.all()
    none = all_runs.subset([])
    assert isinstance(none, Runs)
    assert none.rounds.empty


def test_every_strategy_has_a_distinct_style():
    assert set(STYLES) == set(STRATEGIES)
    looks = [(style.color, style.dash) for style in STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert style_of("one_of_my_own") == style_of("one_of_my_own")
