"""Commands that train nothing, options of all, and what sweeps pass: in this process, for they are many."""

import logging
import shutil
from pathlib import Path

import pytest
import yaml

import sharding
from train.__main__ import main
from train.listing import REGISTRIES


@pytest.fixture(autouse=True)
def quiet_logs(monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **how: None)


def test_config_prints_what_would_be_run(capsys):
    words = ["config", "configs/quickstart.yaml", "--local.lr=0.05", "model.width=8", "--seed=3", "--strategy=dense"]
    assert main(words) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert (told["local"]["lr"], told["model"]["width"], told["seed"], told["strategy"]) == (0.05, 8, 3, "dense")
    assert told["local"]["momentum"] == 0.9, "defaults as well"
    assert told["output"] == "runs/quickstart-dense-lr=0.05,width=8-3"


def test_list_names_all_there_is(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for key, registry in REGISTRIES.items():
        assert key in out
        assert [name for name in registry if name not in out] == []
    assert "figure4" in out
    assert "configs/quickstart.yaml" in out


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"spectral-sharding {sharding.__version__}\n"


CONFIG, COMPARE = (["config", "configs/quickstart.yaml"], ["compare", "configs/quickstart.yaml"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["config", "configs/quickstart.yaml", "--local.lrr=1"], "did you mean 'local.lr'"),
        (["config", "configs/quickstart.yaml", "--nonsense=1"], "unknown option"),
        (["run", "configs/quickstart.yaml", "--import", "no_such_module"], "cannot import 'no_such_module'"),
        (["report", "configs"], "no run with a finished round in configs"),
        ([*CONFIG, "model.widht=3"], "resnet18_gn has no option 'widht' (did you mean 'width'?)"),
        (["inspect", "configs/quickstart.yaml", "model.width=abc"], "model.width='abc' must be a whole number"),
        (["run", "configs/quickstart.yaml", "model.width=abc"], "model.width='abc' must be a whole number"),
        ([*COMPARE, "--strategies", "dense", "model.width=abc"], "error: model.width='abc' must be a whole number"),
        ([*CONFIG, "clients.sampler=mmfl", "clients.budget=2", "tasks={a: {model: {widht: 3}}}"], "no option 'widht'"),
        (["report", "nowhere"], "there is no folder nowhere; name folders that hold runs\n"),
        (["report", "configs", "--targets", "0.8,800"], "0.8,800"),
        (["report", "configs", "--targets", "most"], "is no list of numbers"),
        (["compare", "configs/quickstart.yaml", "--grid", "local.lr"], "write key=value,value"),
        (["compare", "configs/quickstart.yaml"], "--grid"),
        ([*CONFIG, "local.lr=1", "local.lr=2"], "'local.lr' is set twice, by 'local.lr=1' and 'local.lr=2'; keep one"),
        ([*CONFIG, "seed=1", "--seed=2"], "'seed' is set twice, by 'seed=1' and 'seed=2'"),
        ([*COMPARE, "--grid", "strategy=dense", "--strategies", "top_n"], "by 'strategy=dense' and '--strategies'"),
        ([*COMPARE, "strategy=dense", "--strategies", "top_n"], "'strategy' is set twice"),
        ([*COMPARE, "seed=1", "--seeds", "0", "--grid", "strategy=dense"], "by 'seed=1' and '--seeds'"),
        ([*COMPARE, "local.lr=1", "--grid", "local.lr=1,2"], "by 'local.lr=1' and 'local.lr=1,2'"),
        ([*COMPARE, "--seeds", "a"], "'a' is no whole number; see python -m train compare --help"),
        (["run", "configs/quickstart.yaml", "--rounds", "3"], "'--rounds' (write rounds=3); see python -m train run -"),
        (["run", "configs/quickstart.yaml", "--local.lr"], "(write local.lr=…)"),
    ],
)
def test_mistakes_are_one_line(words, told, capsys):
    assert main(words) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert told in line
    assert line.count("\n") == 1


NOT_HERE = "configs/quickstart.yaml/here"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["run", "configs/quickstart.yaml", f"output={NOT_HERE}"], "output=…"),
        ([*COMPARE, "--strategies", "dense", f"output={NOT_HERE}"], "output=…"),
        (["inspect", "configs/quickstart.yaml", f"output={NOT_HERE}"], "output=…"),
        (["report", "results/quickstart_seeds", "--output", NOT_HERE], "--output"),
        (["table", "1", "--output", NOT_HERE], "--output"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_folder_that_cannot_be_is_told_before_anything_else(words, remedy, capsys):
    assert main(words) == 2
    told = f"error: cannot write to {NOT_HERE}: Not a directory; choose another {remedy}\n"
    assert capsys.readouterr() == ("", told)


def test_a_tracker_where_there_are_none_says_what_brings_one(capsys, tmp_path):
    assert main(["run", "configs/quickstart.yaml", "tracking.use=[mine]", f"output={tmp_path / 'run'}"]) == 2
    assert "unknown tracker 'mine': none is registered; --import MODULE" in capsys.readouterr().err


def test_report_is_a_command(tmp_path, capsys):
    shutil.copytree("results/quickstart_seeds/dense-0", tmp_path / "dense-0")
    assert main(["report", str(tmp_path), "--targets", "90", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "first reached 90 %" in page
    assert f"python -m train report {tmp_path} --targets 90 --quiet" in page
    assert (tmp_path / "report.csv").exists()


def test_the_sweeps_words_are_understood(capsys):
    """As W&B's agent writes them: `--key=value`, for ${args}."""
    sweep = yaml.safe_load(Path("examples/sweep.yaml").read_text())
    args = [f"--{key}={its.get('values', [its.get('min')])[0]}" for key, its in sweep["parameters"].items()]
    command = [arg for word in sweep["command"][3:] for arg in (args if word == "${args}" else [word])]
    assert command[:2] == ["train", "run"]
    assert main(["config", *command[2:]]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert (told["strategy"], told["local"]["lr"], told["keep_ratio"]) == ("unbiased", 0.01, 0.1)


TINY = ["model={name: mlp, hidden: [16, 16]}", "clients.count=6", "clients.per_round=3", "rounds=2", "local.epochs=1"]


def test_runs_that_nobody_trained_do_not_end_a_report(tmp_path, capsys):
    words = ["clients.sampler=uniform_upload", "clients.budget=0.001", f"output={tmp_path / 'nobody'}"]
    assert main(["run", "configs/quickstart.yaml", *TINY, *words]) == 0
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "configs/quickstart.yaml", "local.lr=0.1", "local={lr: 0.2}"], "'local.lr' is set twice"),
        (["compare", "configs/quickstart.yaml", "--grid", "threads=1,2"], "makes no other run"),
        (["table", "1", "strategy=dense"], "strategy is set by the table itself"),
        (["table", "1", "seed=5"], "use --seeds"),
        (["run", "configs/quickstart.yaml", "local.optimizer_options={a: 1}"], "no option 'a'"),
        (
            ["run", "configs/quickstart.yaml", "data.partition=two_sizes", "data.partition_options={classes: -3}"],
            "classes=-3 must be at least 0",
        ),
        (
            [
                *("run", "configs/quickstart.yaml", "clients.sampler=mmfl", "clients.budget=2"),
                "tasks={a: {patience: 1}, b: {}}",
            ],
            "tasks.a.patience is not for one task alone",
        ),
    ],
)
def test_what_would_be_lost_in_silence_is_refused(tmp_path, capsys, words, told):
    out = [f"output={tmp_path / 'out'}"] if words[0] == "run" else ["--output", str(tmp_path)] * (words[0] == "table")
    assert main([*words, *out]) == 2
    assert told in capsys.readouterr().err


def test_an_empty_summary_is_what_a_full_disk_had_left(tmp_path):
    out = tmp_path / "out"
    words = ["run", "configs/quickstart.yaml", *TINY, f"output={out}"]
    assert main(words) == 0
    (out / "summary.md").write_text("")
    assert main([*words, "--resume"]) == 0
