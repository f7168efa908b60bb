"""The command line from end to end: in this process, and a few times as a process of its own."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sharding import UserError
from tests.train.runs import QUICKSTART, REPOSITORY, TINY, read, without_times
from train.cli.commands import main


@pytest.fixture
def train(monkeypatch, capsys):
    """Run a command in this process."""
    monkeypatch.setenv("COLUMNS", "120")

    def command(*words):
        code = main([*map(str, words)])
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return command


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [pytest.param([], 0, "", marks=pytest.mark.slow), (["local.lrr=1"], 2, "error: unknown config key 'local.lrr'")],
)
def test_run_as_a_process_exits_with_0_or_one_line_and_2(words, code, line, tmp_path):
    options = [*TINY, "engine=sequential", f"output={tmp_path}", *words]
    command = [sys.executable, "-W", "error", "-m", "train", "run", QUICKSTART, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == bool(line)
    assert (tmp_path / "summary.md").exists() == (code == 0)


def test_command_whose_reader_has_left_ends_as_by_sigpipe():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "train", "list"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_compare_prints_a_table_and_the_folder(tmp_path, train):
    out = tmp_path / "out"
    done = train("compare", QUICKSTART, "--strategies", "unbiased,dense", "--seeds", "0,1", f"output={out}", *TINY)
    assert done.returncode == 0, done.stderr
    for words in ("strategy", "test accuracy", "of dense FedAvg's bytes", "unbiased", "dense", "100.0 %"):
        assert words in done.stdout
    assert f"accuracy_vs_bytes.svg to {out}\n" in done.stdout
    assert done.stdout.endswith(f": python -m train report {out}\n")
    for name in ("unbiased-0", "unbiased-1", "dense-0", "dense-1"):
        assert [line["round"] for line in read(out / name)] == [0, 1]
    assert (out / "accuracy_vs_bytes.png").read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again"
    one_by_one = ["--strategies", "unbiased,dense", "--seeds", "1", "--jobs", "1", f"output={again}"]
    assert train("compare", QUICKSTART, *one_by_one, *TINY).returncode == 0
    for name in ("unbiased-1", "dense-1"):
        assert without_times(read(again / name)) == without_times(read(out / name))
    summary = (out / "summary.md").read_text()
    assert "| unbiased |" in summary
    assert "mean ± standard deviation of 2 seeds" in summary


@pytest.mark.usefixtures("undrawn")
def test_compare_summary_has_all_runs_of_the_folder(tmp_path, train):
    out, quickstart = tmp_path / "out", [QUICKSTART, *TINY]
    assert train("compare", *quickstart, "--strategies", "dense", f"output={out}").returncode == 0
    shutil.copytree(out / "dense-0", out / "broken-0")
    (out / "broken-0" / "metrics.jsonl").write_text("")
    added = train("compare", *quickstart, "--strategies", "unbiased", f"output={out}")
    assert added.returncode == 0, added.stderr
    summary = (out / "summary.md").read_text()
    for words in ("| unbiased |", "| dense |", "--strategies dense output=", "--strategies unbiased output="):
        assert words in summary
    assert f"Not finished, and not in the table: `{out / 'broken-0'}`\n" in summary
    assert len((out / "summary.csv").read_text().splitlines()) == 3
    again = train("compare", *quickstart, "--strategies", "unbiased", f"output={out}", "--resume")
    assert "1 of 1 runs had already finished" in again.stdout
    assert (out / "summary.md").read_text() == summary
    alone = train("run", *quickstart, f"output={out}", "--resume")
    assert (alone.returncode, alone.stderr) == (2, OTHERS.format(out))
    nested = train("compare", *quickstart, "--strategies", "dense", f"output={out / 'dense-0'}")
    assert (nested.returncode, nested.stderr) == (2, HOLDS_A_RUN.format(out / "dense-0"))
    assert (out / "summary.md").read_text() == summary


OTHERS = "error: {} holds other runs, as broken-0, and a run needs its own folder; choose another output=…\n"
HOLDS_A_RUN = "error: {} holds a run; a comparison needs another folder: choose another output=…\n"


@pytest.mark.usefixtures("undrawn")
def test_compare_with_a_failed_run_reports_it(tmp_path, train):
    rates = ["--grid", "local.optimizer.lr=0.1,1e30", "--seeds", "0", "--jobs", "1"]
    done = train("compare", QUICKSTART, *rates, f"output={tmp_path}", *TINY)
    assert done.returncode == 1
    (failed,) = (path for path in tmp_path.glob("*1e*") if path.is_dir())
    summary = (tmp_path / "summary.md").read_text()
    assert f"\n\nFailed, and not in the table: `{failed}`: no client's update could be used" in summary
    assert "of 2 rounds, one seed. " in summary


@pytest.mark.usefixtures("undrawn")
def test_second_run_is_refused_and_resume_continues(tmp_path, train):
    arguments = ["run", QUICKSTART, f"output={tmp_path}", *TINY]
    assert train(*arguments).returncode == 0
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = train(*arguments)
    assert again.returncode == 2
    assert again.stderr.strip().endswith(
        "already holds a run; choose another with output=…, or continue it with --resume"
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    summary = (tmp_path / "summary.md").read_bytes()
    finished = train(*arguments, "--resume")  # a finished run is not run again, nor its summary written
    assert (finished.returncode, finished.stdout) == (0, f"{tmp_path} has already finished: nothing was run\n")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "summary.md").read_bytes() == summary


def test_compare_with_an_existing_run_starts_nothing(tmp_path, train):
    (tmp_path / "dense-0").mkdir()
    (tmp_path / "dense-0" / "metrics.jsonl").write_text("kept")
    strategies = ["--strategies", "top_n,dense"]
    done = train("compare", QUICKSTART, *strategies, f"output={tmp_path}", *TINY)
    assert done.returncode == 2
    assert "dense-0 already holds a run" in done.stderr
    assert not (tmp_path / "top_n-0").exists()
    assert (tmp_path / "dense-0" / "metrics.jsonl").read_text() == "kept"


def test_debug_raises_the_error(train):
    with pytest.raises(UserError, match="none"):
        train("run", QUICKSTART, "strategy=none", "--debug")


def test_wandb_online_without_an_account_prints_one_line(tmp_path, monkeypatch, train):
    pytest.importorskip("wandb")
    for variable, value in {"WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}.items():
        monkeypatch.setenv(variable, value)
    out = tmp_path / "out"
    done = train("run", QUICKSTART, f"output={out}", "tracker=wandb", *TINY)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: W&B: ")
    assert not (out / "config.yaml").exists()
    assert not (out / "metrics.jsonl").exists()


def test_import_sharding_needs_no_packages_of_the_program():
    """Neither timm, wandb, R nor anything of models/ or train/ is needed for `import sharding`."""
    code = (
        "import sys, sharding\n"
        "heavy = {'timm', 'torchvision', 'wandb', 'rpy2', 'pydantic', 'matplotlib', 'sklearn', 'models', 'train'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
