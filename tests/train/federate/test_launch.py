"""What `federate` starts on this machine, without starting it."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from sharding import UserError
from train.__main__ import main
from train.config import load_config
from train.failures import RunError
from train.federate import launch
from train.federate.app import read
from train.federate.nodes import Patience
from train.stages import watched

QUICKSTART = "configs/quickstart.yaml"


def read_for(nodes, *overrides):
    return read(launch.settings_of(QUICKSTART, overrides, nodes, Patience(60.0, 60.0)))


def test_directories_tell_federations_apart_and_from_a_run():
    directories = [read_for(2).directory, read_for(4).directory, read_for(2, "local.lr=0.05").directory]
    directories.append(load_config(QUICKSTART).directory.resolve())
    assert len({*directories}) == 4
    assert {directory.parent for directory in directories} == {Path("runs").resolve()}


def test_an_output_of_ones_own_is_kept():
    assert read_for(2, "output=/tmp/own").directory == Path("/tmp/own")


def test_a_folder_that_cannot_be_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    config = read_for(2, f"output={tmp_path / 'file' / 'run'}")
    with pytest.raises(UserError, match=r"cannot write to .*: Not a directory; choose another output=…"):
        launch.federate(config, {}, lambda metrics: None)


LOGS = {  # the server's log, and what is told of it
    "INFO round 0\nERROR the run ends: lower local.lr\nDEBUG pushes its output\n": "lower local.lr; see ",
    "Traceback:\nValueError: of torch's\nExit Code: 201\n\nDEBUG pushes\n": "did: ValueError: of torch's; ",
    "INFO nothing of note\n": "run ended before the run did; ",
}


@pytest.mark.parametrize(("text", "told"), LOGS.items(), ids=["own", "python", "none"])
def test_a_run_that_ended_is_told_with_its_reason(tmp_path, text, told):
    (tmp_path / "run.log").write_text(text)
    why = launch.why_ended({"run"}, tmp_path)
    assert told in why
    assert str(tmp_path) in why


def test_processes_find_the_modules_of_the_folder_that_federate_was_started_in(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/first")
    monkeypatch.chdir(tmp_path)
    assert launch.Place(tmp_path, 1).environment("server")["PYTHONPATH"].split(os.pathsep) == ["/first", str(tmp_path)]


@pytest.mark.parametrize("option", ["--start-timeout", "--round-timeout"])
@pytest.mark.parametrize("seconds", ["-3", "0", "nan", "inf"])
def test_a_wait_that_is_none_is_refused_in_one_line(tmp_path, capsys, option, seconds):
    assert main(["federate", QUICKSTART, "--nodes", "2", f"output={tmp_path / 'run'}", f"{option}={seconds}"]) == 2
    assert capsys.readouterr().err == f"error: {option[2:]} is {seconds}; allowed are seconds above 0, e.g. 300\n"
    assert not (tmp_path / "run").exists()


def test_the_nodes_that_have_come_are_told_once(tmp_path):
    log, told = tmp_path / "run.log", []
    look = launch.arrivals(log, 2)
    lines = ["INFO node 7 is client 1: 9 samples, r = 0.2", "INFO node 8 is client 1: 9 samples, r = 0.2"]
    with watched(told.append):
        look()
        for line in [*lines, "INFO node 9 is client 0: 9 samples, r = 0.2"]:
            with log.open("a") as file:
                file.write(f"{line}\n")
            look()
    assert told == ["1 of 2 nodes are there", "2 of 2 nodes are there, trains"]


class Recording:
    """Processes of which none ends, while the server writes a round each time that somebody looks."""

    def __init__(self, path, rounds):
        self.path, self.rounds = path, iter(rounds)

    def ended(self):
        with self.path.open("a") as file:
            file.write(json.dumps(next(self.rounds)) + "\n")
        return {}


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_federation_that_lost_all_its_rounds_has_failed(tmp_path, monkeypatch, earlier):
    config = read_for(2, "rounds=3", f"output={tmp_path}")
    monkeypatch.setattr(launch, "sleep", lambda seconds: None)
    monkeypatch.setattr(launch, "is_finished", lambda config: config.rounds == len(path.read_text().splitlines()))
    path, lost, shown = tmp_path / "metrics.jsonl", {"heard": 0, "failed": 2}, []
    path.write_text((json.dumps(lost) + "\n") * earlier)  # by an earlier start: this one has rounds of its own to lose
    with pytest.raises(RunError, match="in 3 rounds in a row") if not earlier else nullcontext():
        launch.follow(Recording(path, [lost] * 3), config, shown.append)
    assert len(shown) == 3


def test_overrides_that_a_federation_replaces_are_told_a_line_each(caplog):
    read_for(2, "clients.count=3", "engine=stacked", "clients.per_round=1", "local.lr=0.05")
    assert [record.getMessage() for record in caplog.records] == [
        "clients.count=3 does not count: with 2 nodes it is 2",
        "engine=stacked does not count: with 2 nodes it is sequential",
    ]
