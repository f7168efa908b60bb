"""What a deployer meets, with real processes: no round is lost by it."""

import os
import shlex
import signal
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from tests.train.federate.relay import Relay
from tests.train.federate.test_federation import SMALL
from tests.train.runs import PATIENCE, model_of, read, wait_until
from train.config.schema import load_config
from train.federate import launch
from train.federate.launch import LOOPBACK, Deployment
from train.federate.roster import Timeouts
from train.federate.server_app import ROOT
from train.federate.supervisor import Processes
from train.run import run

pytestmark = [pytest.mark.federation, pytest.mark.slow]

# A layer of 1200 × 1200 at r = 0.5: shards of 6 MB, and Flower cuts arrays into chunks of 5 MB.
WIDE = ["model.hidden=[1200, 1200]", "rounds=2"]


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def assert_equals_a_simulation(directory, small, *overrides):
    """Make sure that no update was lost, and that the model has the bits of a simulation."""
    two = ["clients.count=2", "clients.per_round=2", "engine=sequential", "aggregation.max_share=0.5"]
    config = load_config(small, [*overrides, *two, f"output={directory.parent / 'alone'}"])
    assert [line["num_aggregated"] for line in read(directory)] == [2] * config.rounds
    run(config)
    assert model_of(directory) == model_of(config.directory)


def other_version(folder):
    """Write another version of the library, which reads no shard of ours."""
    copytree(ROOT / "sharding", folder / "sharding", ignore=ignore_patterns("__pycache__"))
    codec = folder / "sharding" / "rounds" / "codec.py"
    source = codec.read_text()
    reading = "values = _decoded(tensors, metadata)"
    assert reading in source
    codec.write_text(source.replace(reading, "raise RuntimeError"))
    return folder


def test_node_with_a_proxy_and_another_version_that_reconnects_loses_no_round(small, tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{LOOPBACK}:9")  # where nobody answers
    timeouts = Timeouts(PATIENCE, PATIENCE)
    config, settings = launch.configure(small, [f"output={tmp_path / 'run'}", *WIDE], 2, timeouts)
    deployment = launch.lay_out(config, settings)
    with Processes(deployment.folder / "logs") as processes:
        launch.start_server(processes, deployment)
        relay = Relay(deployment.port)
        launch.start_node(processes, deployment, 0, launch.node_settings(config, deployment, 0))
        monkeypatch.setenv("PYTHONPATH", str(other_version(tmp_path / "other")))
        outside = Deployment(deployment.folder, relay.port)
        launch.start_node(processes, outside, 1, launch.node_settings(config, deployment, 1))
        launch.submit(processes, deployment)
        wait_until(lambda: (config.directory / "metrics.jsonl").exists() and read(config.directory))
        relay.cut()
        processes.started["run"].terminate()  # the operator's view of the log, of which the run is independent
        log = deployment.folder / "logs" / "node-1.log"
        wait_until(lambda: "Connection attempt failed, retrying" in log.read_text())
        relay.restore()
        launch.follow(processes, deployment, config, print)
        relay.cut()
    assert_equals_a_simulation(config.directory, small, *WIDE)


def test_server_that_restarts_while_nodes_train_resumes(small, tmp_path):
    deployment, output = Deployment(tmp_path, launch.free_port()), tmp_path / "run"
    (tmp_path / "logs").mkdir()
    operator = Path(deployment.environment("operator")["FLWR_HOME"])
    operator.mkdir(parents=True)
    (operator / "config.toml").write_text(f'[superlink.mine]\naddress = "{deployment.address}"\ninsecure = true\n')
    superlink = ["flower-superlink", "--insecure", "--host", LOOPBACK, "--port", str(deployment.port)]
    superlink += ["--database", str(tmp_path / "superlink.db"), "--disable-runtime-dependency-installation"]
    words = shlex.join([f"output={output}", "rounds=3", "clients.count=2", "clients.per_round=2"])
    settings = f'config="{small}" overrides="{words}" start-timeout={PATIENCE} round-timeout={PATIENCE}'
    submit = ["flwr", "run", str(ROOT), "mine", "--stream", "--run-config", settings]
    with Processes(tmp_path / "logs") as processes:

        def start(name, command):
            processes.start(name, command, deployment.environment(name))

        start("superlink", superlink)
        for node in range(2):
            options = ["--insecure", "--superlink", deployment.address, "--port", str(launch.free_port())]
            start(f"node-{node}", [*launch.SUPERNODE, *options, "--node-config", f"partition-id={node}"])
        wait_until(lambda: launch.listens(deployment.port))
        start("operator", submit)
        wait_until(lambda: (output / "metrics.jsonl").exists() and read(output))
        os.kill(processes.started["superlink"].pid, signal.SIGKILL)
        wait_until(lambda: {"superlink", "operator"} <= processes.ended().keys())
        assert len(read(output)) < 3
        start("superlink", superlink)
        wait_until(lambda: launch.listens(deployment.port))
        start("operator", submit)
        wait_until(lambda: len(read(output)) == 3 or "operator" in processes.ended())
        assert not {"node-0", "node-1"} & processes.ended().keys()
    assert_equals_a_simulation(output, small, "rounds=3")
