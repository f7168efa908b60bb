"""Real processes on loopback: a SuperLink, SuperNodes, and a run; each is started here and ended by its number."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch
from safetensors.torch import load_file

from sharding.rounds.failures import Failure, Kind
from tests.sharding.flower.programs import ROOT, Programs, free_port
from tests.train.runs import PATIENCE, model_of, wait_until
from tests.train.runs import read as read_metrics
from train.config.schema import load_config
from train.engines import Reply, SequentialEngine
from train.experiment.assembly import assemble
from train.rounds import run_rounds
from train.run import run

pytestmark = pytest.mark.federation

SMALL = (
    "{name: small, rounds: 2, model: {name: mlp, hidden: [32, 16]}, data: {name: digits}, "
    "clients: {count: 16, per_round: 16}, keep_ratio: {0.25: 0.5, 0.5: 0.5}, local: {epochs: 1}}"
)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def everyone(nodes, *overrides):
    """Return the overrides of a run whose clients all take part."""
    return [f"clients.count={nodes}", f"clients.per_round={nodes}", *overrides]


def run_config(small, overrides, round_timeout=PATIENCE):
    return (
        f'config="{small}" overrides="{shlex.join(overrides)}" start-timeout={PATIENCE} round-timeout={round_timeout}'
    )


def simulation(small, output, *overrides):
    """Return the configuration of a simulation of a federation."""
    words = [*overrides, f"output={output}", "engine=sequential", "aggregation.max_share=0.5"]
    return load_config(small, words)


def running(number):
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.startswith("Z")


def below(number):
    """Return the numbers of the processes that this one has started, and those in turn, with their commands."""
    shown = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    lines = [line.split(None, 2) for line in shown.stdout.splitlines()]
    family = {str(number)}
    while more := {child for child, parent, _ in lines if parent in family} - family:
        family |= more
    return {int(child): command for child, _, command in lines if child in family - {str(number)}}


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


@pytest.mark.slow
def test_federation_round_with_killed_or_late_nodes_continues(small, tmp_path):
    words, output = everyone(6, "rounds=1"), tmp_path / "run"
    with Programs(tmp_path / "programs") as programs:
        programs.superlink()
        nodes = {node: programs.node(node, f'fault="{LOSSES.get(node, ("",))[0]}"') for node in range(1, 6)}
        settings = run_config(small, [*words, f"output={output}"], round_timeout=40.0)
        run = programs.submit(faulty_app(tmp_path / "faulty-app"), settings)
        wait_until(lambda: "is client 2:" in programs.log("run"))
        os.kill(nodes[2].pid, signal.SIGKILL)
        programs.node(0)  # only now is everybody there, and the round begins
        run.wait(PATIENCE)
    (line,) = read_metrics(output)
    assert (line["num_aggregated"], line["num_failed"]) == (2, len(LOSSES))
    for client, (_, reason) in LOSSES.items():
        assert re.search(reason, line["failures"][str(client)])
    expected = with_participation(simulation(small, tmp_path / "alone", *words), set(LOSSES))
    trained = load_file(output / "checkpoint.safetensors")
    assert all(torch.equal(expected[name], trained[name]) for name in expected)


def test_script_with_a_killed_server_resumes_to_the_simulation(small, tmp_path):
    output, words = tmp_path / "run", ["rounds=3", "name=a b"]

    def start():
        command = [ROOT / "examples/federation.sh", "2", small, output, *words]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PORT": str(free_port()), "PATH": path}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    first = start()
    try:
        wait_until(lambda: (output / "metrics.jsonl").exists() and read_metrics(output))
        started = below(first.pid)
        (superlink,) = (number for number, command in started.items() if "flower-superlink" in command)
        os.kill(superlink, signal.SIGKILL)
        _, told = first.communicate(timeout=PATIENCE)
    finally:
        first.terminate()
        first.communicate()
    assert first.returncode == 1
    assert "the run has not finished; the same command resumes it\n" in told
    assert 1 <= len(read_metrics(output)) < 3
    wait_until(lambda: not any(map(running, started)))
    second = start()
    _, told = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, told
    assert "are run again" not in (output / "federation/run.log").read_text()
    config = simulation(small, tmp_path / "alone", *everyone(2, *words))
    run(config)
    assert model_of(output) == model_of(config.directory)
    assert [line["num_aggregated"] for line in read_metrics(output)] == [2, 2, 2]
