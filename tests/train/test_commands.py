"""Commands that train nothing, options of all, and what sweeps pass: in this process, for they are many."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import sharding
from tests.train.runs import TINY
from train.cli.arguments import HELP, parse
from train.cli.commands import COMMANDS, main
from train.cli.listing import REGISTRIES
from train.config.naming import with_directory
from train.config.schema import load_config
from train.config.yaml_text import parse_yaml, read_yaml


def test_config_command_prints_the_complete_configuration(capsys):
    words = [
        "config",
        "configs/quickstart.yaml",
        "local.optimizer.lr=0.05",
        "model.width=8",
        "seed=3",
        "strategy=dense",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    told = parse_yaml(printed)
    assert (told["model"]["width"], told["seed"], told["strategy"]) == (8, 3, "dense")
    assert told["local"]["optimizer"] == {"name": "sgd", "lr": 0.05, "momentum": 0.9}, "defaults as well"
    assert printed.endswith("\n# output: runs/quickstart-dense-lr=0.05,width=8-3\n")


def test_list_command_names_all_parts(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for key, registry in REGISTRIES.items():
        assert key in out
        assert [name for name in registry if name not in out] == []
    assert "figure4" in out
    assert "configs/quickstart.yaml" in out


def test_version_option_prints_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"spectral-sharding {sharding.__version__}\n"


NOT_HERE = "configs/quickstart.yaml/here"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["run", "configs/quickstart.yaml", f"output={NOT_HERE}"], "output=…"),
        (["compare", "configs/quickstart.yaml", "--strategies", "dense", f"output={NOT_HERE}"], "output=…"),
        (["inspect", "configs/quickstart.yaml", f"output={NOT_HERE}"], "output=…"),
        (["report", "results/quickstart_seeds", "--output", NOT_HERE], "--output"),
        (["table", "1", "--output", NOT_HERE], "--output"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_command_with_an_impossible_folder_prints_one_line(words, remedy, capsys):
    assert main(words) == 2
    told = f"error: cannot write to {NOT_HERE}: Not a directory; choose another {remedy}\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.usefixtures("undrawn")
def test_report_command_writes_the_page(tmp_path, capsys):
    shutil.copytree("results/quickstart_seeds/dense-0", tmp_path / "dense-0")
    assert main(["report", str(tmp_path), "--targets", "90", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<th>90 %</th>" in page
    assert f"python -m train report {tmp_path} --targets 90 --quiet" in page
    assert (tmp_path / "report.csv").exists()


@pytest.mark.parametrize("command", HELP)
def test_help_examples_of_any_command_are_valid(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    examples = [line.split("train ", 1)[1] for line in shown.splitlines() if line.startswith("  python -m train ")]
    assert len(examples) == 2
    assert "Writes" in shown
    for example in examples:
        args = parse(shlex.split(example.partition(" > ")[0]))
        if "config" in args:
            load_config(args.config, args.overrides)


def test_sweep_arguments_of_wandb_are_accepted(capsys):
    """As W&B's agent writes them: `key=value`, for ${args_no_hyphens}."""
    sweep = read_yaml(Path("examples/sweep.yaml"))
    parameters = sweep["parameters"]
    args = [f"{key}={each.get('values', [each.get('min')])[0]}" for key, each in parameters.items()]
    command = [arg for word in sweep["command"][3:] for arg in (args if word == "${args_no_hyphens}" else [word])]
    assert command[:2] == ["train", "run"]
    assert main(["config", *command[2:]]) == 0
    told = parse_yaml(capsys.readouterr().out)
    assert (told["strategy"], told["local"]["optimizer"]["lr"]) == ("top_n", 0.01)
    assert (told["data"]["holdout"], sweep["metric"]["name"]) == (300, "best_val_accuracy")


def test_printed_config_names_the_directory_by_later_settings(tmp_path, capsys):
    assert main(["config", "configs/quickstart.yaml", "strategy=unbiased"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("\n# output: runs/quickstart-unbiased-0\n")
    (tmp_path / "my.yaml").write_text(printed)
    config = load_config(tmp_path / "my.yaml", ["strategy=dense"])
    assert with_directory(config, ["strategy=dense"]).directory == Path("runs/quickstart-dense-0")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run configs/quickstart.yaml", "; the same command with --resume continues from the last checkpoint"),
        ("table 1", "; the same command continues from the last checkpoint"),
        ("report runs", ""),
        ("list", ""),
    ],
)
def test_interrupted_command_says_how_to_continue(command, told, monkeypatch, capsys):
    def interrupt(args, console):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, command.split()[0], interrupt)
    assert main(command.split()) == 130
    assert capsys.readouterr().err == f"interrupted{told}\n"


@pytest.mark.usefixtures("undrawn")
def test_report_of_runs_without_updates_succeeds(tmp_path, capsys):
    words = ["clients.sampler=uniform_upload", "clients.sampler.budget=0.001", f"output={tmp_path / 'nobody'}"]
    assert main(["run", "configs/quickstart.yaml", *TINY, *words]) == 0
    assert main(["report", str(tmp_path)]) == 0


def test_command_with_a_closed_stdout_succeeds(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["config", "configs/quickstart.yaml", f"output={tmp_path}"]) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_command_with_a_full_stdout_prints_one_line(capsys, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY | os.O_CREAT), "w", closefd=False))
        assert main(["config", "configs/quickstart.yaml", f"output={tmp_path}"]) == 1
    assert "error: No space left" in capsys.readouterr().err
