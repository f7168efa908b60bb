"""Trackers: an offline run of Weights & Biases is read back, resumed, and may fail; trackers of one's own."""

import json
import logging
import struct
import sys
from pathlib import Path

import pytest

from sharding import UserError
from tests.train.runs import TINY, read, tiny, wait_until
from train.callbacks import Callback, EachRound
from train.callbacks.trackers import open_trackers
from train.cli.sweep import grid_configs
from train.registries import TRACKERS
from train.run import run
from train.rundir.records import layer_statistics

BLOCK = 32768  # of the log that an offline run is


def records(directory):
    """Yield the records of the offline runs in a directory, the oldest run first."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        data, offset, whole = path.read_bytes(), 7, b""  # after the file's own head
        while offset + 7 <= len(data):
            if (left := BLOCK - offset % BLOCK) < 7:
                offset += left
                continue
            _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
            whole += data[offset + 7 : offset + 7 + length]
            offset += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                record = pb.Record()
                record.ParseFromString(whole)
                whole = b""
                yield record


def items(pairs):
    return {pair.key or "/".join(pair.nested_key): json.loads(pair.value_json) for pair in pairs}


def of_kind(all_records, kind):
    return [getattr(record, kind) for record in all_records if record.WhichOneof("record_type") == kind]


def exit_codes(directory):
    return [record.exit_code for record in of_kind(list(records(directory)), "exit")]


@pytest.mark.slow  # W&B starts a process for each run
def test_wandb_offline_run_is_resumed_and_read_back(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    overrides = ["tracker={name: wandb, mode: offline}", "tracker.artifacts=true", "tracker.tags=[mine]"]

    def break_off(metrics):
        if metrics["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny(tmp_path, "rounds=3", *overrides), [EachRound(break_off)])
    wait_until(lambda: exit_codes(tmp_path) == [1])  # W&B's own process writes the file
    run(tiny(tmp_path, "rounds=3", *overrides), resume=True)
    wait_until(lambda: exit_codes(tmp_path) == [1, 0])
    told = list(records(tmp_path))

    starts = of_kind(told, "run")
    assert len({record.run_id for record in starts}) == 1, "resuming continues the run"
    first = starts[0]
    assert (first.run_group, first.job_type) == ("quickstart-collective", "collective")
    assert set(first.tags) == {"collective", "digits", "mine"}
    config = items(first.config.update)
    assert config["local"]["optimizer"]["lr"] == 0.02
    assert set(config["versions"]) >= {"python", "torch", "commit"}

    lines = [items(record.item) for record in of_kind(told, "history")]
    rounds = [line for line in lines if "round" in line]
    assert [line["round"] for line in rounds] == [0, 1, 2], "no round twice"
    lines_of_file = read(tmp_path)
    moved, best = 0.0, 0.0
    for line, ours in zip(rounds, lines_of_file, strict=True):
        moved, best = moved + (ours["bytes_down"] + ours["bytes_up"]) / 1e6, max(best, ours["test_accuracy"])
        assert line["megabytes"] == pytest.approx(moved)
        assert line["best_test_accuracy"] == best
        assert (line["test_accuracy"], line["lr"]) == (ours["test_accuracy"], ours["lr"])
    layers = [{key.split("/")[0] for key in line if "/" in key} for line in rounds]
    assert layers == [{"anme", "magnitudes", "inclusion", "multipliers"}, set(), layers[0]]
    metrics = {record.name: record for record in of_kind(told, "metric")}
    assert metrics["best_test_accuracy"].step_metric == "megabytes"
    assert metrics["test_accuracy"].step_metric == "round"
    assert metrics["test_accuracy"].summary.max
    (artifact,) = of_kind(told, "artifact")
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(files) >= {"model.safetensors", "metrics.jsonl", "summary.md", "accuracy_vs_bytes.svg", "report.html"}
    assert "| collective |" in files["summary.md"].read_text(encoding="utf-8"), "it is kept until it is uploaded"


def test_wandb_groups_seeds_by_grid_point(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    told = []

    def init(**how):
        told.append((how["group"], how["tags"]))
        raise wandb.errors.Error("no account")

    monkeypatch.setattr(wandb, "init", init)
    overrides = [*TINY, "tracker={name: wandb, mode: offline}", f"output={tmp_path}", "tracker.tags=[mine]"]
    for cell in grid_configs("configs/quickstart.yaml", overrides, ["top_n"], [0, 1], ["local.optimizer.lr=0.03,0.1"]):
        cell.directory.mkdir()
        with pytest.raises(UserError, match="no account"):
            open_trackers(cell)
    assert told == [
        (f"quickstart-top_n-lr={lr}", ["top_n", "digits", f"lr={lr}", "mine"]) for lr in (0.03, 0.1) for seed in (0, 1)
    ]


@pytest.mark.parametrize("tag", ["''", "' '", "a" * 65])
def test_wandb_tag_that_is_none_is_refused(tmp_path, tag):
    pytest.importorskip("wandb")
    config = tiny(tmp_path, "tracker={name: wandb, mode: offline}", f"tracker.tags=[mine, {tag}]")
    with pytest.raises(UserError, match=r"tracker\.tags has '.*'; W&B takes tags of 1 to 64 characters"):
        open_trackers(config)


def test_wandb_errors_do_not_stop_the_run(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")

    class Run:
        url = "https://wandb.example/run"

        def __init__(self):
            self.summary = {}

        def define_metric(self, *args, **kwargs):
            pass

        def log(self, metrics, step):
            if step == 1:
                raise ConnectionError("the network is gone")

        def finish(self, exit_code):
            raise AssertionError("it has failed and is left alone")

    monkeypatch.setattr(wandb, "init", lambda **how: Run())
    with caplog.at_level(logging.WARNING):
        run(tiny(tmp_path, "tracker={name: wandb, mode: offline}"))
    assert len(read(tmp_path)) == 2
    assert [record.getMessage() for record in caplog.records].count(
        "wandb failed and is skipped from now on; metrics.jsonl has all numbers: the network is gone"
    ) == 1


def test_custom_tracker_has_all_metrics_after_they_are_written(tmp_path, monkeypatch):
    told = []

    class Mine(Callback):
        def __init__(self, config):
            self.config, self.file = config, config.directory / "metrics.jsonl"

        def after_round(self, metrics, plan):
            layers = sorted(layer_statistics(plan))
            told.append((metrics.round, len(self.file.read_text().splitlines()), layers))

        def close(self, failed=False):
            told.append(failed)

    monkeypatch.setitem(TRACKERS, "mine", Mine)
    run(tiny(tmp_path, "tracker=mine"))
    assert told == [(0, 1, ["3", "5"]), (1, 2, ["3", "5"]), False]


def test_unavailable_tracker_raises_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "train.callbacks.wandb_run", raising=False)
    with pytest.raises(ImportError, match="pip install wandb"):
        tiny(tmp_path / "out", "tracker=wandb")
    assert not (tmp_path / "out").exists()
