"""Real processes on loopback: SuperLink, SuperNodes, TLS, keys; each is started here and ended by its number."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch
from safetensors.torch import load_file

from sharding.rounds.failures import Failure, Kind
from tests.train.runs import PATIENCE, model_of, wait_until
from tests.train.runs import read as read_metrics
from train.config.schema import load_config
from train.engines import Reply, SequentialEngine
from train.experiment.assembly import assemble
from train.federate import launch
from train.federate.keys import write_node_key
from train.federate.roster import Timeouts
from train.federate.supervisor import Processes
from train.rounds import run_rounds
from train.run import run

pytestmark = pytest.mark.federation

ROOT = Path(__file__).parents[3]
SMALL = (
    "{name: small, rounds: 2, model: {name: mlp, hidden: [32, 16]}, data: {name: digits}, "
    "clients: {count: 16, per_round: 16}, keep_ratio: {0.25: 0.5, 0.5: 0.5}, local: {epochs: 1}}"
)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def there(number):
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.startswith("Z")


def command_line(small, output, *words):
    command = [sys.executable, "-m", "train", "federate", small, "--nodes", "2", f"output={output}", *words]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL)


def superlink_of(folder):
    """Return the number of the SuperLink of this run, by the keys it was given."""
    shown = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True)
    servers = [line.split() for line in shown.stdout.splitlines() if "flower-superlink" in line and str(folder) in line]
    return int(servers[0][0])


def test_node_without_a_key_or_tls_is_refused(small, tmp_path):
    _, deployment = federation(small, tmp_path, 2, Timeouts(PATIENCE, PATIENCE))
    supernode = [str(Path(sys.executable).with_name("flower-supernode")), "--superlink", deployment.address]
    logs = deployment.folder / "logs"
    with Processes(logs) as processes:
        launch.start_server(processes, deployment)
        strange = tmp_path / "strange"
        strange.mkdir()
        write_node_key(strange)
        trusting = [*supernode, "--root-certificates", str(deployment.folder / "ca.crt"), "--max-retries", "1"]
        unknown = ["--auth-supernode-private-key", str(strange / "node.key"), "--port", str(launch.free_port())]
        processes.start("unknown", [*trusting, *unknown], deployment.environment("unknown"))
        processes.start("keyless", [*trusting, "--port", str(launch.free_port())], deployment.environment("keyless"))
        plain = [*supernode, "--insecure", "--max-retries", "1", "--port", str(launch.free_port())]
        processes.start("plain", plain, deployment.environment("plain"))
        refused = {"unknown", "keyless", "plain"}
        wait_until(lambda: refused <= set(processes.ended()))
    for name in refused:
        assert "SuperNode ID" not in (logs / f"{name}.log").read_text()
    told = (logs / "superlink.log").read_text()
    assert 'activate-node HTTP/1.1" 412' in told  # the one whose key nobody has registered
    assert 'register-node HTTP/1.1" 412' in told  # the one that has none, and makes one up
    assert "Exit Code: 305" in (logs / "plain.log").read_text()
    assert "Activated node_id" not in told


LOSSES = {
    2: ("", "no reply within|not connected|Node Unavailable"),  # ended by the test before it is asked
    3: ("dies in training", "no reply within|Node Unavailable"),
    4: ("dies after training", "no reply within|Node Unavailable"),
    5: ("is late", "no reply within"),
}


def faulty_app(folder):
    """Pack the sources with the app that has faults."""
    kept = ignore_patterns("__pycache__", "*.pyc")
    for name in ("sharding", "models", "train", "configs"):
        copytree(ROOT / name, folder / name, ignore=kept)
    (folder / "faulty.py").write_text((Path(__file__).parent / "faulty.py").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    project = project.replace('clientapp = "train.federate.client_app:app"', 'clientapp = "faulty:app"')
    (folder / "pyproject.toml").write_text(project.replace("fab-include = [", 'fab-include = ["faulty.py", '))
    return folder


def with_participation(config, failing):
    """Run the rounds in this process, without the updates of those that fail."""
    experiment = assemble(config)

    class Some(SequentialEngine):
        def train(self, plan, round, lr):
            for client, update in super().train(plan, round, lr):
                yield client, Reply(None, None, Failure(Kind.FAILED, "lost")) if client in failing else update

    experiment.make_engine = Some
    experiment.start()
    run_rounds(experiment, 0)
    return experiment.model.state_dict()


def federation(small, tmp_path, nodes, timeouts, *overrides):
    config, settings = launch.configure(small, [f"output={tmp_path / 'run'}", *overrides], nodes, timeouts)
    return config, launch.lay_out(config, settings)


def start_faulty(processes, deployment, config, node, faults):
    fault = {"fault": faults[node][0]} if node in faults else {}
    launch.start_node(processes, deployment, node, launch.node_settings(config, deployment, node) | fault)


def told_and_left_out(config, faults):
    """Make sure that each of the faults is named, and is in the result as if that client had not been there."""
    (line,) = read_metrics(config.directory)
    assert (line["num_aggregated"], line["num_failed"]) == (2, len(faults))
    for client, (_, reason) in faults.items():
        assert re.search(reason, line["failures"][str(client)])
    expected = with_participation(config.model_copy(update={"output": None}), set(faults))
    trained = load_file(config.directory / "checkpoint.safetensors")
    return all(torch.equal(expected[name], trained[name]) for name in expected)


@pytest.mark.slow
def test_federation_round_with_killed_or_late_nodes_continues(small, tmp_path):
    config, deployment = federation(small, tmp_path, 6, Timeouts(PATIENCE, 40.0), "rounds=1")
    log = deployment.folder / "logs" / "run.log"
    with Processes(deployment.folder / "logs") as processes:
        launch.start_server(processes, deployment)
        for node in range(1, 6):
            start_faulty(processes, deployment, config, node, LOSSES)
        launch.submit(processes, deployment, faulty_app(tmp_path / "faulty-app"))
        wait_until(lambda: log.exists() and "is client 2:" in log.read_text())
        os.kill(processes.started["node-2"].pid, signal.SIGKILL)
        start_faulty(processes, deployment, config, 0, LOSSES)  # only now is everybody there, and the round begins
        launch.follow(processes, deployment, config, print)
        numbers = [processes.started[name].pid for name in ("superlink", "run", "node-0")]
    assert not any(there(number) for number in numbers)
    assert told_and_left_out(config, LOSSES)


def below(number):
    """Return the numbers of the processes that this one has started, and those in turn."""
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in shown.splitlines())
    family = {number}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {number}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a process that is killed")
def test_killed_launcher_ends_all_processes(small, tmp_path):
    launcher = command_line(small, tmp_path / "run")
    try:
        log = tmp_path / "run" / "federation" / "logs" / "run.log"
        wait_until(lambda: log.exists() and "is client 1:" in log.read_text())
        started = below(launcher.pid)
        assert len(started) > 6  # SuperLink, two SuperNodes and the run, and what is below them
    finally:
        launcher.kill()
        launcher.communicate()
    wait_until(lambda: not any(there(number) for number in started))


def test_federation_with_a_killed_server_resumes_to_the_simulation(small, tmp_path):
    output = tmp_path / "run"
    first = command_line(small, output, "rounds=3")
    try:
        wait_until(lambda: (output / "metrics.jsonl").exists() and read_metrics(output))
        os.kill(superlink_of(output), signal.SIGKILL)
        _, told = first.communicate(timeout=PATIENCE)
    finally:
        first.terminate()
        first.communicate()
    assert first.returncode == 1
    assert "--resume" in told
    assert 1 <= len(read_metrics(output)) < 3
    processes = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert str(output) not in processes  # nothing that was started is left
    second = command_line(small, output, "rounds=3", "--resume")
    _, told = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, told
    assert "are run again" not in (output / "federation" / "logs" / "run.log").read_text()
    two = ["clients.count=2", "clients.per_round=2"]
    config = load_config(
        small, ["rounds=3", f"output={tmp_path / 'alone'}", "engine=sequential", "aggregation.max_share=0.5", *two]
    )
    run(config)
    assert model_of(output) == model_of(config.directory)
    assert [line["num_aggregated"] for line in read_metrics(output)] == [2, 2, 2]
