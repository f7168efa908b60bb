"""The app in examples/flower_app runs in real processes: a SuperLink, two SuperNodes, and `flwr run`."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from tests.sharding.flower.grid import StubGrid
from tests.sharding.flower.programs import Programs, environment_of, free_port
from tests.train.runs import PATIENCE

ROOT = Path(__file__).parents[3]
APP = ROOT / "examples" / "flower_app"


@pytest.mark.federation
def test_example_app_trains_under_flwr_run(tmp_path):
    with Programs(tmp_path) as programs:
        programs.superlink()
        programs.node(0, "keep-ratio=0.1", program=["flower-supernode"])
        programs.node(1, "keep-ratio=0.25")
        assert programs.submit(APP, "rounds=2 lr=0.02").wait(PATIENCE) == 0
        told = programs.log("run")
    assert "left out of round" not in told
    assert "Sampled 2 nodes (out of 2)" in told
    accuracies = [float(accuracy) for accuracy in re.findall(r"MetricRecord: {.*'accuracy': ([\d.]+)", told)]
    assert len(accuracies) == 4, told  # of nodes and of the server, in each round
    assert accuracies[-1] > 0.3  # chance is 0.1


@pytest.fixture
def simulation(tmp_path):
    """Return the environment of a simulation, whose local SuperLink ends with the test; it is on no default port."""
    pytest.importorskip("ray")
    ports = {f"FLWR_LOCAL_{name}_PORT": str(free_port()) for name in ("SUPERLINK_HTTP_API", "CONTROL_API")}
    yield environment_of(tmp_path) | ports | {"RAY_ADDRESS": "local"}
    shown = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        if str(tmp_path) in line:  # the SuperLink's log file
            os.kill(int(line.split()[0]), signal.SIGTERM)


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.parametrize(("folder", "app"), [(ROOT, "examples/flower_app"), (APP, ".")])
def test_documented_command_simulates_the_app(simulation, tmp_path, folder, app):
    head = (APP / "pyproject.toml").read_text()
    (command,) = re.findall(r"^# +(flwr run .*)$", head, re.M)
    assert command in (ROOT / "docs/guides/flower_app.md").read_text()
    words = command.replace("examples/flower_app", app).split()
    with (tmp_path / "run.log").open("w") as output:
        subprocess.run(words, env=simulation, cwd=folder, stdout=output, stderr=output, timeout=PATIENCE, check=True)
    told = (tmp_path / "run.log").read_text()
    assert "left out of round" not in told
    accuracies = [float(accuracy) for accuracy in re.findall(r"MetricRecord: {.*'accuracy': ([\d.]+)", told)]
    assert len(accuracies) == 20, told  # of nodes and of the server, in each round
    assert accuracies[-1] > 0.9


def test_guide_apps_train(monkeypatch, caplog):
    monkeypatch.syspath_prepend(APP)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    server, client = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/flower_app.md").read_text(), re.S)
    exec(server.replace("num_rounds=10", "num_rounds=2"), ours := {})
    exec(client, theirs := {})
    grid = StubGrid(theirs["app"], {7 + node: {"partition-id": node, "keep-ratio": 0.25} for node in range(2)})
    ours["app"](grid, Context(1, 1, {}, RecordDict(), {}))
    assert [kind for _, kind, _ in grid.pushed] == ["query"] * 2 + ["train"] * 4
    assert "left out of round" not in caplog.text
