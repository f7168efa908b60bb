"""Tables and figures: which runs they are made of, and what is written of those that were run."""

import json
import re
from math import sqrt

import pytest

from sharding import UserError
from tests.train.runs import TINY
from train.cli import commands as command_line
from train.config.yaml_text import dump_yaml
from train.report.tables.cells import Cell, cells_of, choose
from train.report.tables.layout import (
    EXPERIMENTS,
    PUBLISHED,
    SCALES,
    TABLES,
    PublishedExperiment,
    Scale,
    Table,
    published_of,
)
from train.report.tables.write import TableReport
from train.rundir.file_names import CONFIG_FILE, METRICS_FILE, PROVENANCE_FILE
from train.rundir.provenance import Provenance
from train.utils.files import UNFINISHED


@pytest.fixture
def small_tables(monkeypatch):
    """A table and a figure of the quickstart."""
    monkeypatch.setitem(SCALES, "small", Scale("tiny runs", (0, 1)))
    monkeypatch.setitem(EXPERIMENTS, "quickstart", PublishedExperiment("Digits", {"small": TINY}))
    for ratio, published in (("0.2", {"top_n": "67.44 ± 2.34"}), ("0.4", {})):
        monkeypatch.setitem(PUBLISHED, ("quickstart", ratio, ""), published | {"dense": "87.46 ± 0.31"})
    small = {
        "1": Table("Tiny", ("quickstart",), ("dense", "top_n"), ("0.2", "0.4")),
        "figure1": Table("Tiny", ("quickstart",), ("dense", "top_n"), ("0.2",), panels=(("rounds", "train_loss"),)),
    }
    for name, table in small.items():
        monkeypatch.setitem(TABLES, name, table)
    return small


@pytest.fixture
def text_of(undrawn):
    """Write the report about cells, and return its text."""
    return _text_of


def _text_of(name, cells, into):
    TableReport(name, TABLES[name], cells, "small", "python", into).write()
    return (into / f"{name if name.startswith('figure') else f'table{name}'}.md").read_text()


def pretend(cell: Cell, accuracies, **last):
    """Write what a run of this cell would have left."""
    directory = cell.config.directory
    directory.mkdir(parents=True)
    (directory / CONFIG_FILE).write_text(dump_yaml(cell.config.model_dump(mode="json", exclude={"output"})))
    lines = [
        {"round": t, "test_accuracy": a, "train_loss": 1.0, "seconds": 2.0, "bytes_down": 5e6, "bytes_up": 5e6}
        | {"num_failed": t, "num_clients": 10, "num_aggregated": 10, "bytes_dense": 1e6, "bytes_total": 1e7 * (t + 1)}
        for t, a in enumerate(accuracies)
    ]
    lines[-1] |= last
    (directory / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = Provenance("sequential", 1, "cpu", {"quickstart": ["half of the digits"]}, ({"round": 0},))
    (directory / PROVENANCE_FILE).write_text(made.to_json())


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("scale", SCALES)
def test_cells_of_any_table_are_valid_with_distinct_directories(table, scale, tmp_path):
    cells = cells_of(table, scale, tmp_path)
    assert len(cells) == len(table.settings()) * len(table.strategies) * len(SCALES[scale].seeds)
    by_name = {cell.name: cell.config for cell in cells}
    for cell in cells:
        assert cell.config == by_name[cell.name]
        assert (cell.config.strategy, cell.config.seed) == (cell.strategy, cell.seed)
    assert len({config.model_dump_json(exclude={"output"}) for config in by_name.values()}) == len(by_name)


def test_paper_scale_cells_are_the_published_configurations(tmp_path):
    table = {cell.name for cell in cells_of(TABLES["1"], "paper", tmp_path)}
    assert "cifar10_resnet18/r0.1/collective-2" in table
    assert "cifar10_resnet18/whole/dense-0" in table
    effect_of_alpha = {cell.name for cell in cells_of(TABLES["figure3"], "paper", tmp_path)}
    assert "cifar10_resnet18/r0.1/collective-2" in effect_of_alpha  # α = 1 is what the config says anyway
    assert "cifar10_resnet18/r0.1_data.partition.alpha=10/collective-2" in effect_of_alpha
    (cell,) = choose(cells_of(TABLES["1"], "paper", tmp_path), ["shakes*/r0.2x*/collective-1"])
    assert cell.config.keep_ratio == {0.2: 0.6, 0.4: 0.4}
    assert (cell.config.rounds, cell.config.clients.count) == (1500, 715)


def test_published_values_of_a_setting_are_by_strategy():
    settings = {setting.label: setting for setting in TABLES["1"].settings()[:2]}
    assert published_of(settings["r = 0.1"], "collective") == "82.59 ± 0.27"
    assert published_of(settings["r = 0.2"], "collective") == "85.00 ± 0.34"
    assert published_of(settings["r = 0.2"], "dense") == "87.46 ± 0.31"


@pytest.mark.parametrize(("name", "count"), [("1", 150), ("2", 16), ("3", 8), ("4", 24), ("5", 9)])
def test_cells_of_the_papers_tables_have_published_values(name, count):
    table = TABLES[name]
    cells = [published_of(setting, strategy) for setting in table.settings() for strategy in table.strategies]
    assert len(cells) == count
    numbers = [[float(number) for number in value.split(" ± ")] for value in cells]
    assert all(0 < deviation < mean < 100 for mean, deviation in numbers)


def test_settings_without_clipping_have_separate_published_values(tmp_path):
    short, long = TABLES["2"].settings()
    assert published_of(short, "top_n") == "21.13 ± 2.01"
    assert published_of(long, "top_n") == "32.22 ± 1.74"
    _, unclipped = TABLES["3"].settings()[:2]
    assert published_of(unclipped, "unbiased") == "30.14 ± 1.58"
    assert published_of(TABLES["figure3"].settings()[1], "unbiased") is None  # of another α
    rounds = {
        scale: [choose(cells_of(TABLES["2"], scale, tmp_path), [p])[0].config.rounds for p in ("*", "rounds=")]
        for scale in SCALES
    }
    assert rounds == {"small": [40, 133], "medium": [400, 1333], "paper": [1500, 5000]}


def test_choose_by_pattern_selects_cells_or_raises(tmp_path):
    cells = cells_of(TABLES["1"], "small", tmp_path, seeds=[7])
    names = [cell.name for cell in choose(cells, ["cifar10_*r0.2/top_n-", "whole"])]
    assert names[0] == "cifar10_resnet18/r0.2/top_n-7"  # in the order of the patterns
    assert sum("whole" in name for name in names) == 10  # full and dense of five experiments
    assert len(names) == len(set(names)) == 11
    varied = cells_of(TABLES["2"], "small", tmp_path)
    assert not any("," in cell.name for cell in varied)  # --only splits there
    with pytest.raises(UserError, match="--only cifar11 matches none"):
        choose(cells, ["cifar11"])
    with pytest.raises(UserError, match="scale 'big'"):
        cells_of(TABLES["1"], "big", tmp_path)


def test_table_has_finished_runs_and_dashes(small_tables, tmp_path):
    table = small_tables["1"]
    cells = cells_of(table, "small", tmp_path)
    of = {cell.name: cell for cell in cells}
    pretend(of["quickstart/r0.2/top_n-0"], [0.1, 0.5])
    pretend(of["quickstart/r0.2/top_n-1"], [0.1, 0.6])
    pretend(of["quickstart/r0.4/top_n-0"], [0.7])  # one of its two rounds
    pretend(of["quickstart/whole/dense-0"], [0.1, 0.9])
    paths = TableReport("1", table, cells, "small", "python -m train table 1", tmp_path).write()
    text = (tmp_path / "table1.md").read_text()
    assert f"| top_n | 55.0 ± {10 / sqrt(2):.1f} (2 lost) | 67.44 ± 2.34 | – | – |" in text
    assert "| dense | 90.0 (1 lost) | 87.46 ± 0.31 | 90.0 (1 lost) | 87.46 ± 0.31 |" in text
    assert "Ours on data that are not the official ones: half of the digits." in text
    assert "3 of 6 runs are finished, 4 to 4 s of rounds each." in text
    assert "`quickstart/r0.4/top_n-0` is at round 1 of 2 (70.0 %)." in text
    assert "Made by `python -m train table 1`." in text
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert re.findall(r"\((\w+\.png)\)", text) == [paths[1].name]


def test_table_with_a_run_at_its_target_counts_it_finished(small_tables, tmp_path, text_of):
    table = small_tables["1"]
    cells = cells_of(table, "small", tmp_path, [0])
    (early,) = [cell for cell in cells if cell.name == "quickstart/r0.2/top_n-0"]
    pretend(early, [0.55], stopped="test accuracy 55.0 % has reached 0.5")
    text = text_of("1", cells, tmp_path)
    assert "| top_n | 55.0 | 67.44 ± 2.34 |" in text
    assert "1 of 3 runs are finished" in text
    assert "is at round" not in text


def test_table_with_an_unreadable_run_leaves_it_out(small_tables, tmp_path, caplog, text_of):
    table = small_tables["1"]
    cells = cells_of(table, "small", tmp_path, [0])
    of = {cell.name: cell for cell in cells}
    pretend(of["quickstart/r0.2/top_n-0"], [0.5, 0.6])
    pretend(of["quickstart/r0.4/top_n-0"], [0.7], test_accuracy=1e308)
    text = text_of("1", cells, tmp_path)
    assert "| top_n | 60.0 (1 lost) | 67.44 ± 2.34 | – | – |" in text
    assert str(of["quickstart/r0.4/top_n-0"].config.directory) in caplog.text


def test_table_without_runs_is_all_dashes(small_tables, tmp_path, text_of):
    for name, told in (("1", "| top_n | – | 67.44 ± 2.34 | – | – |"), ("figure1", "0 of 4 runs are finished.")):
        assert told in text_of(name, cells_of(small_tables[name], "small", tmp_path), tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_table_command_runs_only_missing_cells(small_tables, tmp_path, capsys):
    assert command_line.main(["table", "figure5"]) == 2
    assert "unknown table 'figure5' (did you mean 'figure4'?)" in capsys.readouterr().err
    out = tmp_path / "out"
    words = ["table", "1", "--seeds", "0", "--output", str(out), "--jobs", "2", "--only"]
    assert command_line.main([*words, "r0.2"]) == 0
    ran = out / "cells" / "quickstart" / "r0.2" / "top_n-0" / METRICS_FILE
    before = ran.read_bytes()
    assert not (out / "cells" / "quickstart" / "whole").exists()
    assert re.search(r"\| top_n \| \d+\.\d \| 67.44 ± 2.34 \| – \| – \|", (out / "table1.md").read_text())
    (out / "cells" / "quickstart" / "whole" / "dense-0").mkdir(parents=True)
    assert command_line.main([*words, "r0.2,whole"]) == 0
    assert ran.read_bytes() == before
    assert re.search(r"\| dense \| \d+\.\d \| 87.46 ± 0.31 \|", (out / "table1.md").read_text())
    assert command_line.main([*words, "r0.2", "local.optimizer.lr=0.3"]) == 2  # never another run's directory
    assert "holds a run with local.optimizer.lr=0.02, not 0.3;" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_table_command_with_a_failed_cell_runs_the_others(small_tables, tmp_path, capsys):
    out = tmp_path / "out"
    blocked = out / "cells" / "quickstart" / "r0.2" / "top_n-0"
    (blocked / (CONFIG_FILE + UNFINISHED)).mkdir(parents=True)  # a folder where a file is to be written
    words = ["table", "1", "--seeds", "0", "--output", str(out), "--jobs", "1", "--only", "top_n"]
    assert command_line.main(words) == 1
    assert "1 of 2 runs failed" in capsys.readouterr().err
    assert re.search(r"\| top_n \| – \| 67.44 ± 2.34 \| \d+\.\d \| – \|", (out / "table1.md").read_text())


def test_table_of_experiments_without_runs_has_one_line(tmp_path, text_of):
    table = TABLES["1"]
    cells = cells_of(table, "small", tmp_path, [0])
    (begun,) = [cell for cell in cells if cell.name == "cifar10_resnet18/r0.1/top_n-0"]
    pretend(begun, [0.1, 0.5])
    text = text_of("1", cells, tmp_path)
    assert text.count("| top_n |") == 1
    assert "Not begun, and left out here: TinyImageNet / CCT, CIFAR-100 / ResNet, CIFAR-100 / CCT, Shakespeare" in text


@pytest.mark.parametrize(
    ("begun", "drawn"),
    [(["r0.1/top_n-0", "whole/dense-0"], ["0.1"]), (["whole/dense-0"], ["0.1", "0.2", "{0.2: 0.6, 0.4: 0.4}"])],
)
def test_figure_has_the_bound_beside_its_curves(begun, drawn, tmp_path):
    table = TABLES["1"]
    cells = cells_of(table, "small", tmp_path, [0])
    for cell in {cell.name: cell for cell in cells if cell.name.removeprefix("cifar10_resnet18/") in begun}.values():
        pretend(cell, [0.1, 0.5])
    report = TableReport("1", table, cells, "small", "python", tmp_path)
    figure = report.draw(report.drawn())
    titles = [title for axes in figure.axes if (title := axes.get_title(loc="left"))]
    assert titles == [f"CIFAR-10 / ResNet\nr = {ratio}" for ratio in drawn]
