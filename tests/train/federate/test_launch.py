"""What `federate` starts on this machine, without starting it."""

import json
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from sharding import UserError
from tests.train.runs import REPOSITORY, refused
from train.cli.commands import main
from train.config.schema import load_config
from train.federate import launch
from train.federate.roster import Timeouts
from train.federate.server_app import read
from train.federate.status import FINISHED, LOCK_FILE, Status
from train.rundir.directory import lock
from train.utils.errors import RunError
from train.utils.stages import stage_listener

QUICKSTART = "configs/quickstart.yaml"


def read_for(nodes, *overrides):
    return launch.configure(QUICKSTART, overrides, nodes, Timeouts(60.0, 60.0))[0]


def test_directories_of_federations_and_runs_differ():
    directories = [read_for(2).directory, read_for(4).directory, read_for(2, "local.optimizer.lr=0.05").directory]
    directories.append(load_config(QUICKSTART).directory.resolve())
    assert len({*directories}) == 4
    assert {directory.parent for directory in directories} == {Path("runs").resolve()}
    for output in ("/tmp/own", "/tmp/\N{ROCKET}"):
        config, settings = launch.configure(QUICKSTART, [f"output={output}"], 2, Timeouts(60.0, 60.0))
        assert config.directory == Path(output)
        assert read(tomllib.loads(launch._toml(settings))) == config


def test_launch_with_an_impossible_folder_raises(tmp_path):
    (tmp_path / "file").touch()
    config = read_for(2, f"output={tmp_path / 'file' / 'run'}")
    with pytest.raises(UserError, match=r"cannot write to .*: Not a directory; choose another output=…"):
        launch.federate(config, {}, print)


@pytest.mark.parametrize("output", ["new/run", "there"])
def test_refused_federation_leaves_nothing(tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    command = ["federate", str(REPOSITORY / QUICKSTART), "--nodes", "2", "data.holdout=5000", f"output={output}"]
    refused(capsys, command, "data.holdout=5000 must be at most")


def test_second_federation_in_a_directory_is_refused(tmp_path):
    config, settings = launch.configure(QUICKSTART, [f"output={tmp_path}"], 2, Timeouts(60.0, 60.0))
    with lock(tmp_path / LOCK_FILE):
        launch.lay_out(config, settings)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match="another run writes to"):
            launch.federate(config, settings, print)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_launch_environment_has_the_working_folder_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/first")
    monkeypatch.chdir(tmp_path)
    modules = launch.Deployment(tmp_path, 1).environment("server")["PYTHONPATH"]
    assert modules == f"/first{os.pathsep}{tmp_path}"


@pytest.mark.parametrize("option", ["--start-timeout", "--round-timeout"])
@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_federate_with_an_invalid_timeout_prints_one_line(tmp_path, capsys, option, seconds):
    assert main(["federate", QUICKSTART, "--nodes", "2", f"output={tmp_path / 'run'}", f"{option}={seconds}"]) == 2
    assert capsys.readouterr().err == f"error: {option[2:]} is {seconds}; allowed are seconds above 0, e.g. 300\n"
    assert not (tmp_path / "run").exists()


class Server:
    """The server's app and what started it, a step each time that somebody looks."""

    def __init__(self, config, *steps):
        self.status, self.path, self.steps = Status(config), config.directory / "metrics.jsonl", iter(steps)
        self.started, self.log = [], config.directory / "federation" / "logs" / "run.log"
        self.log.parent.mkdir(parents=True)
        self.log.touch()

    def ended(self):
        step = next(self.steps)
        self.status.set(**{key: step[key] for key in step.keys() & {"joined", "waiting_for", "ended"}})
        with self.path.open("a") as file:
            file.writelines(json.dumps(metrics) + "\n" for metrics in step.get("rounds", []))
        return dict(step.get("codes", {}))

    def start(self, name, command, environment):
        self.started.append((name, command))
        with self.log.open("x"):  # Flower sends the whole log again
            pass


ROUNDS = [{"round": t} for t in range(3)]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "sleep", lambda seconds: None)
    return read_for(2, "rounds=3", f"output={tmp_path / 'run'}")


def follow(config, *steps, server=None):
    shown, stages = [], []
    deployment = launch.Deployment(config.directory / "federation", 1)
    with stage_listener(stages.append):
        launch.follow(server or Server(config, *steps), deployment, config, shown.append)
    return shown, stages


@pytest.fixture
def flower_says(monkeypatch):
    """Set what `flwr list` prints of the run: its status, or None if it fails."""

    def say(*states):
        left = iter(states)

        def flwr(deployment, *words):
            assert words == ("list", "loopback", "--format", "json")
            if (state := next(left)) is None:
                return SimpleNamespace(returncode=1, stdout='{"success": false, "error-message": "no answer"}')
            runs = [{"run-id": "7", "status": state, "status-details": "No heartbeat"}] if state else []
            return SimpleNamespace(returncode=0, stdout=json.dumps({"success": True, "runs": runs}))

        monkeypatch.setattr(launch, "flwr", flwr)

    return say


def test_follow_shows_each_round_and_node_once(config):
    waits = {"joined": [1], "waiting_for": [0]}
    trains = {"joined": [0, 1], "waiting_for": [], "rounds": ROUNDS[:1]}
    shown, stages = follow(config, {}, waits, waits, trains, {"rounds": ROUNDS[1:], "ended": FINISHED})
    assert shown == ROUNDS
    assert stages == ["1 of 2 nodes connected, waiting for 0", "2 of 2 nodes connected, training"]


ENDS = {  # what happens, and what the error names
    "own words": ({"ended": "lower local.optimizer.lr"}, "^lower local.optimizer.lr; see "),
    "the SuperLink": ({"codes": {"superlink": -9}}, r"^superlink \(exit code -9\) ended before"),
    "all nodes": ({"codes": {"node-0": 1, "node-1": 1}}, "^node-0 .*node-1"),
}


@pytest.mark.parametrize(("step", "reason"), ENDS.values(), ids=ENDS)
def test_follow_of_a_run_that_ends_early_raises_with_the_reason(config, step, reason):
    with pytest.raises(RunError, match=reason):
        follow(config, {}, step)


@pytest.mark.parametrize("code", [0, 1, -15])
def test_follow_of_a_run_whose_log_stream_ends_early_continues(config, flower_says, code):
    flower_says("running", "starting")
    cut = {"codes": {"run": code, "node-0": 1}}  # with one of two nodes, no more have ended than that
    server = Server(config, {}, cut | {"rounds": ROUNDS[:1]}, {}, cut, {"rounds": ROUNDS[1:], "ended": FINISHED})
    shown, _ = follow(config, server=server)
    assert shown == ROUNDS
    assert server.started == [("run", ["flwr", "log", "7", "loopback", "--stream"])] * 2


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("finished:failed", r"^the server's app ended without a report; Flower says finished:failed \(No heartbeat\)"),
        ("", r"^run \(exit code 0\) ended before the run did"),
        (None, r"^run \(exit code 0\) ended before the run did"),
    ],
    ids=["crashed", "not accepted", "no answer"],
)
def test_follow_of_a_run_that_flower_does_not_run_raises(config, flower_says, state, reason):
    flower_says(state)
    with pytest.raises(RunError, match=reason):
        follow(config, {}, {"codes": {"run": 0}})


def test_follow_of_a_run_that_ends_while_flower_is_asked_finishes(config, flower_says, monkeypatch):
    server = Server(config, {}, {"codes": {"run": 0}}, {"codes": {"run": 0}, "rounds": ROUNDS})
    flower_says("finished:completed")
    says = launch.flwr
    monkeypatch.setattr(launch, "flwr", lambda *words: (server.status.set(ended=FINISHED), says(*words))[1])
    assert follow(config, server=server)[0] == ROUNDS
    assert server.started == []


def test_follow_logs_an_ended_node_once(config, caplog):
    follow(config, {"codes": {"node-1": 1}}, {"codes": {"node-1": 1}}, {"ended": FINISHED})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["node-1 has ended"]


def test_last_log_line_of_a_process_is_printable(tmp_path):
    (tmp_path / "log").write_text("first\nno \x1b[2Jconnection \n \n")
    assert launch.last_words(tmp_path / "log") == "no ?[2Jconnection"
    assert launch.last_words(tmp_path / "none") == "its log is empty"


@pytest.mark.parametrize(("key", "fixed", "other"), [("checkpoint_every", "1", "7"), ("engine", "sequential", "auto")])
def test_federation_with_another_engine_or_checkpointing_is_refused(key, fixed, other):
    assert str(getattr(read_for(2, f"{key}={fixed}"), key)) == fixed
    with pytest.raises(UserError, match=f"{key}={other} does nothing in a federation, where it is {fixed}"):
        read_for(2, f"{key}={other}")


def test_federation_with_clients_count_is_refused():
    with pytest.raises(UserError, match=r"'clients\.count=3' and '--nodes'"):
        read_for(2, "clients.count=3")


def test_federation_invites_as_many_clients_as_an_override_says_and_at_most_one_a_node():
    assert [read_for(nodes).clients.per_round for nodes in (2, 40)] == [2, 5]  # the file has 5 of 20
    assert read_for(40, "clients.per_round=30").clients.per_round == 30
    with pytest.raises(UserError, match=r"clients\.per_round=5 must be at most clients\.count=2"):
        read_for(2, "clients.per_round=5")


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY", "no_grpc_proxy"])
def test_environment_of_a_node_behind_a_proxy_exempts_loopback(monkeypatch, name):
    monkeypatch.setenv(name, "example.org")
    assert launch.Deployment(Path("run"), 1).environment("node")[name] == "example.org,127.0.0.1,localhost"
