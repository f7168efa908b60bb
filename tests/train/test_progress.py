"""What is seen of a run: by a clock of the test's own, on consoles that are read."""

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from train.callbacks import EachRound
from train.cli.commands import handler
from train.cli.progress import RoundProgress, RunProgress
from train.cli.sweep import sweep
from train.config.schema import load_config
from train.run import run
from train.utils.stages import stage_listener

SMALL = ["rounds=1", "model={name: mlp, hidden: [16, 16]}"]
CONFIG = load_config("tests/quickstart.yaml", ["rounds=10", "output=/nowhere"])


def line(round, **other):
    return {
        "round": round,
        "train_loss": 0.5,
        "bytes_down": 1e6,
        "bytes_up": 5e5,
        "bytes_total": 1.5e6 * (round + 1),
        "num_failed": 0,
        "seconds": 2.0,
    } | other


class Time:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_progress_without_a_terminal_prints_lines_periodically():
    time, out = Time(), io.StringIO()
    with RoundProgress(Console(file=out, width=200), [CONFIG], now=time) as progress:
        progress.show_stage(0, "reading digits")
        assert out.getvalue() == "collective: writing to /nowhere\ncollective: reading digits\n"
        for t in range(10):
            time.now += 12
            progress.show(0, line(t, **({"test_accuracy": 0.125, "num_failed": 1} if t == 3 else {})))
    assert out.getvalue().splitlines()[2:] == [
        "collective: round 1 of 10, loss 0.500, 1.5 MB, 0:18 left",
        "collective: round 4 of 10, loss 0.500, accuracy 12.5 %, 6.0 MB, 1 lost, 0:12 left",
        "collective: round 7 of 10, loss 0.500, accuracy 12.5 %, 10.5 MB, 1 lost, 0:06 left",
        "collective: round 10 of 10, loss 0.500, accuracy 12.5 %, 15.0 MB, 1 lost",
    ]


def test_progress_on_a_terminal_shows_a_bar():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, color_system=None)
    with RoundProgress(console, [CONFIG], ["r [0.1]"]) as progress:
        progress.show_stage(0, "reading [own]")
        progress._bars.refresh()
        progress.show(0, line(0, test_accuracy=0.25))
    shown = out.getvalue()
    assert "r [0.1]" in shown
    assert "reading [own]" in shown
    assert "1/10, loss 0.500, accuracy 25.0 %, 1.5 MB, 0:18 left" in shown


def test_progress_bar_with_all_columns_fits_80_characters():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with RoundProgress(console, [CONFIG, CONFIG], ["collective", "b"]) as progress:
        progress.show(0, line(2, test_accuracy=0.25, bytes_total=1.001e9, num_failed=12))
    assert "collective ━━" in out.getvalue()
    assert "3/10, loss 0.500, accuracy 25.0 %, 1,001.0 MB, 12 lost, 0:14 left" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_a_run_that_ends_early_shows_the_reason(terminal):
    out, reason = (
        io.StringIO(),
        "test accuracy 25.0 % has reached target_accuracy=0.25, and the terminal has but 80 columns",
    )
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with RoundProgress(console, [CONFIG]) as progress:
        progress.show(0, line(0))
        progress.show(0, line(1, test_accuracy=0.25, stopped=reason))
    shown = out.getvalue()
    assert f"collective: ended with round 2 of 10: {reason}" in " ".join(shown.split())
    assert ("2/10" if terminal else "round 2 of 10") + ", loss 0.500, accuracy 25.0 %, 3.0 MB" in shown
    assert "left" not in shown.rpartition("3.0 MB")[2]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_starts_with_the_output_folder(terminal):
    one, two = (CONFIG.model_copy(update={"output": Path("/nowhere/table") / name}) for name in "ab")
    for configs, where in (([one], "collective: writing to /nowhere/table/a"), ([one, two], "/nowhere/table")):
        out = io.StringIO()
        with RoundProgress(Console(file=out, force_terminal=terminal, width=80), configs) as progress:
            progress.show_stage(0, "reading digits")
            progress.show_stage(0, "distributing digits")
        first, *others = out.getvalue().splitlines()
        assert first.endswith(where)
        assert terminal or not any(where in line for line in others)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_quiet_console_shows_nothing(terminal):
    out = io.StringIO()
    with RoundProgress(Console(file=out, quiet=True, force_terminal=terminal), [CONFIG, CONFIG]) as progress:
        progress.show(1, line(0))
    assert not out.getvalue().strip("\x1b[?25lh\n")


def test_time_left_counts_only_rounds_of_this_process():
    run = RunProgress("resumed", 10)
    run.update(line(6))
    assert (run.done, run.seconds_left) == (7, 6.0)


def test_progress_without_a_finished_round_removes_the_bars():
    for rounds in ([], [line(0)]):
        with RoundProgress(Console(file=io.StringIO(), force_terminal=True), [CONFIG, CONFIG]) as progress:
            progress.show_stage(1, "reading digits")
            for metrics in rounds:
                progress.show(0, metrics)
        assert progress._bars.live.transient is not bool(rounds)
        assert len(progress.idle) == 2 - len(rounds)


def test_progress_of_a_resumed_run_counts_earlier_rounds(tmp_path):
    out = io.StringIO()
    lines = [line(t, num_failed=1, test_accuracy=0.125) for t in range(4)]  # the last one is run again
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    resumed = CONFIG.model_copy(update={"output": tmp_path})
    with RoundProgress(Console(file=out, width=200), [resumed]) as progress:
        progress.show(0, line(3))
    told = "collective: round 4 of 10, loss 0.500, accuracy 12.5 %, 6.0 MB, 3 lost, 0:12 left\n"
    assert out.getvalue().endswith(told)


def test_progress_shows_the_stages_before_the_first_round(tmp_path):
    config = load_config("tests/quickstart.yaml", [*SMALL, f"output={tmp_path / 'one'}"])
    stages = ["reading digits", "distributing digits among 20 clients", "building mlp"]
    stages += ["preparing the engine auto", "training its first round"]
    told, rounds = [], []
    with stage_listener(told.append):
        run(config, [EachRound(rounds.append)])
    assert told == stages
    run(config.model_copy(update={"output": tmp_path / "unseen"}), [EachRound(rounds.append)])
    assert told == stages, "nobody watches any more"
    by_index = {0: [], 1: []}
    cells = [config.model_copy(update={"output": tmp_path / name}) for name in "ab"]
    sweep(cells, lambda index, metrics: None, 2, on_stage=lambda index, stage: by_index[index].append(stage))
    assert by_index == {0: stages, 1: stages}


def test_long_warning_without_a_terminal_is_one_line():
    out, path = io.StringIO(), "/" + "/".join(["folder-[1]"] * 20)
    record = logging.LogRecord("train", logging.WARNING, __file__, 1, "see %s", (path,), None)
    handler(Console(file=out, width=80)).emit(record)
    assert out.getvalue().endswith(f" WARNING see {path}\n")
    assert out.getvalue().count("\n") == 1
