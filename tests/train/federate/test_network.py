"""What a deployer meets, with real processes: no round is lost by it."""

import os
import signal
from shutil import copytree, ignore_patterns

import pytest

from tests.sharding.flower.programs import LOOPBACK, ROOT, Programs
from tests.train.federate.relay import Relay
from tests.train.federate.test_federation import SMALL, everyone, run_config, simulation
from tests.train.runs import PATIENCE, model_of, read, wait_until
from train.run import run

pytestmark = [pytest.mark.federation, pytest.mark.slow]

# A layer of 1200 × 1200 at r = 0.5: shards of 6 MB, and Flower cuts arrays into chunks of 5 MB.
WIDE = ["model.hidden=[1200, 1200]", "rounds=2"]


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def assert_equals_a_simulation(output, small, *overrides):
    """Make sure that no update was lost, and that the model has the bits of a simulation."""
    config = simulation(small, output.parent / "alone", *everyone(2, *overrides))
    assert [line["num_aggregated"] for line in read(output)] == [2] * config.rounds
    run(config)
    assert model_of(output) == model_of(config.directory)


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
    output = tmp_path / "run"
    with Programs(tmp_path / "programs") as programs:
        programs.superlink()
        relay = Relay(programs.port)
        programs.node(0)
        programs.node(1, port=relay.port, PYTHONPATH=str(other_version(tmp_path / "other")))
        programs.submit(ROOT, run_config(small, everyone(2, *WIDE, f"output={output}")))
        wait_until(lambda: (output / "metrics.jsonl").exists() and read(output))
        relay.cut()
        wait_until(lambda: "Connection attempt failed, retrying" in programs.log("node-1"))
        relay.restore()
        wait_until(lambda: "finished: " in programs.log("run"))
        relay.cut()
    assert_equals_a_simulation(output, small, *WIDE)


def test_server_that_restarts_while_nodes_train_resumes(small, tmp_path):
    output = tmp_path / "run"
    database, settings = tmp_path / "superlink.db", run_config(small, everyone(2, "rounds=3", f"output={output}"))
    with Programs(tmp_path / "programs") as programs:
        superlink = programs.superlink("--insecure", "--database", database)
        nodes = [programs.node(number) for number in range(2)]
        first = programs.submit(ROOT, settings)
        wait_until(lambda: (output / "metrics.jsonl").exists() and read(output))
        os.kill(superlink.pid, signal.SIGKILL)
        superlink.wait()
        first.wait(PATIENCE)
        assert len(read(output)) < 3
        programs.superlink("--insecure", "--database", database)
        programs.submit(ROOT, settings)
        wait_until(lambda: "finished: " in programs.log("run"))
        assert [node.poll() for node in nodes] == [None, None]
    assert_equals_a_simulation(output, small, "rounds=3")
