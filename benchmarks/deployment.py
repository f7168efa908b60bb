"""Measure a federation on Flower: seconds and bytes a round, and our engine against Flower's simulation.

`wire` starts real processes on loopback: a SuperLink and 2, 4 and 8 SuperNodes, with TLS and keys. A relay between them
counts the bytes. Flower's own empty round is the lower bound. Rounds wait for Flower's polls (3 s at a SuperNode, 1 s
before a process starts) and for a new process per message, so the best round is reported.

    python benchmarks/deployment.py wire results/deployment       # nodes 2, 4, 8: seconds and bytes
    python benchmarks/deployment.py engines results/deployment    # ours and Flower's simulation
"""

import json
import os
import socket
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Thread
from time import sleep

from train.callbacks import EachRound
from train.config.schema import load_config
from train.data import default_root
from train.federate import launch
from train.federate.launch import LOOPBACK
from train.federate.roster import Patience
from train.federate.server_app import ROOT, read
from train.federate.supervisor import Processes
from train.run import run

CONFIG = str(ROOT / "configs" / "quickstart.yaml")
NODES = (2, 4, 8)
WIDE = ["model.width=128", "keep_ratio=0.1", "local.epochs=1", "local.batch_size=32", "rounds=3", "evaluate_every=3"]
ROUND = ["clients.per_round=10", "keep_ratio=0.1", "rounds=5", "evaluate_every=5"]
MEDIUM = ["model.width=32", "model.blocks=[1,1,1,1]", "model.groups=16", "model.stem_stride=2", "local.epochs=1"]
# 10 clients, a ResNet, r = 0.1: the quickstart's with its own batches and with the paper's, CIFAR-10's narrowed.
WORKLOADS = {
    "digits-8": ("quickstart.yaml", [*ROUND, "clients.count=10", "local.batch_size=8"]),
    "digits-32": ("quickstart.yaml", [*ROUND, "clients.count=10", "local.batch_size=32"]),
    "cifar10": ("cifar10_resnet18.yaml", [*ROUND, *MEDIUM, "rounds=4"]),
}


class Relay:
    """Relays bytes between the nodes and the server, and counts them each way."""

    def __init__(self, port: int) -> None:
        self.down = self.up = 0
        self._to, self._listener = port, socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            node, _ = self._listener.accept()
            try:
                server = socket.create_connection((LOOPBACK, self._to))
            except OSError:  # the server has ended
                node.close()
                continue
            Thread(target=self._hand_on, args=(node, server, "up"), daemon=True).start()
            Thread(target=self._hand_on, args=(server, node, "down"), daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def federated(nodes: int, folder: Path) -> tuple[list[dict[str, float]], list[tuple[int, int]]]:
    """Return the rounds' metrics, and the bytes sent down and up until the end of each."""
    everyone = [f"clients.count={nodes}", f"clients.per_round={nodes}"]
    settings = launch.settings_of(CONFIG, [*WIDE, *everyone, f"output={folder}"], nodes, Patience(600.0, 600.0))
    config = read(settings)
    place, passed = launch.lay_out(config, settings), []
    with Processes(place.folder / "logs") as processes:
        launch.start_server(processes, place)
        relay = Relay(place.port)
        for node in range(nodes):
            through = replace(place, port=relay.port)
            launch.start_node(processes, through, node, launch.node_settings(config, place, node))
        launch.submit(processes, place)
        launch.follow(processes, config, lambda metrics: passed.append((relay.down, relay.up)))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, passed


def empty(nodes: int, folder: Path, rounds: int = 4) -> list[float]:
    """Return the seconds of Flower's own rounds with empty messages."""
    settings = launch.settings_of(CONFIG, [f"output={folder}"], nodes, Patience(600.0, 600.0))
    place = launch.lay_out(read(settings), settings)
    app, output = place.folder / "empty-app", folder / "empty.txt"
    app.mkdir()
    (app / "empty_round.py").write_text(Path(__file__).parent.joinpath("peers", "empty_round.py").read_text())
    (app / "pyproject.toml").write_text(
        '[project]\nname = "empty"\nversion = "0.1.0"\ndescription = ""\nlicense = "Apache-2.0"\n'
        '[tool.flwr.app]\npublisher = "spectral-sharding"\n'
        '[tool.flwr.app.components]\nserverapp = "empty_round:server"\nclientapp = "empty_round:client"\n'
        '[tool.flwr.app.config]\nnodes = 0\nrounds = 0\noutput = ""\n'
    )
    (place.folder / "run.toml").write_text(f'nodes = {nodes}\nrounds = {rounds}\noutput = "{output}"\n')
    with Processes(place.folder / "logs") as processes:
        launch.start_server(processes, place)
        for node in range(nodes):
            launch.start_node(processes, place, node, {"partition-id": node})
        launch.submit(processes, place, app)
        while not output.exists() and "run" not in processes.ended():
            sleep(0.5)
    return [float(seconds) for seconds in output.read_text().split()]


def wire(into: Path, nodes: int) -> None:
    """Measure the rounds of this many nodes and write the results."""
    scratch = Path(mkdtemp())
    lines, passed = federated(nodes, scratch / "nodes")
    floor = empty(nodes, scratch / "empty", rounds=len(lines))
    rmtree(scratch)
    rounds = range(1, len(lines))  # the first one carries the app, and nodes are still starting
    sent = [tuple(now - before for now, before in zip(passed[t], passed[t - 1], strict=True)) for t in rounds]
    shards = [(lines[t]["bytes_down"], lines[t]["bytes_up"]) for t in rounds]
    over = [sum(real) / sum(own) - 1 for real, own in zip(sent, shards, strict=True)]
    row = {
        "nodes": nodes,
        "overrides": [*WIDE, f"clients.per_round={nodes}"],
        "seconds": [lines[t]["seconds"] for t in rounds],
        "seconds_empty": floor[1:],
        "shard_bytes": sum(shards[0]),
        "wire_over": over,
    }
    save(into / "wire.json", str(nodes), row)


def simulated_by_us(folder: Path, config: str, overrides: list[str]) -> float:
    """Return the seconds of the best round of our engine."""
    config = load_config(config, [*overrides, f"output={folder}"])
    times: list[float] = []
    run(config, [EachRound(lambda metrics: times.append(float(str(metrics["seconds"]))))])
    return min(times[1:])


def simulated_by_flower(folder: Path, config: str, overrides: list[str]) -> float:
    """Return the seconds of the best round of Flower's simulation, with one actor per core."""
    home = folder.parent / f"{folder.name}-home"
    home.mkdir()
    port = launch.free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    (home / "run.toml").write_text(
        f'config = "{config}"\noverrides = "{" ".join(overrides)} output={folder}"\n'
        "start-timeout = 600.0\nround-timeout = 600.0\n"
    )
    own = launch.Place(home, port).environment("x") | {"FLWR_HOME": str(home)}
    program = Path(sys.executable).with_name
    with Processes(home) as processes:
        server = [str(program("flower-superlink")), "--insecure", "--simulation", "--port", str(port)]
        processes.start("superlink", [*server, "--disable-runtime-dependency-installation"], own)
        while socket.socket().connect_ex((LOOPBACK, port)):
            sleep(0.2)
        command = [str(program("flwr")), "run", str(ROOT), "x", "--stream", "--run-config", str(home / "run.toml")]
        count = load_config(config, overrides).clients.count
        cores = f"num-supernodes={count} client-resources-num-cpus=1"
        subprocess.run(
            [*command, "--federation-config", cores], env=os.environ | own, check=True, stdout=subprocess.DEVNULL
        )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return min(line["seconds"] for line in lines[1:])


def engines(into: Path, workload: str) -> None:
    """Time the round on our engine, on a plain loop, and on Flower's simulation, and write the results."""
    scratch, (name, overrides) = Path(mkdtemp()), WORKLOADS[workload]
    config = str(ROOT / "configs" / name)
    words = [
        *overrides,
        f"data.root={default_root().resolve()}",
    ]  # absolute, as processes work in different folders
    row = {
        "config": name,
        "overrides": overrides,
        "ours": simulated_by_us(scratch / "ours", config, words),
        "sequential": simulated_by_us(scratch / "sequential", config, [*words, "engine=sequential"]),
        "flower": simulated_by_flower(scratch / "flower", config, words),
    }
    rmtree(scratch)
    save(into / "engines.json", workload, row)


def save(path: Path, name: str, row: dict[str, object]) -> None:
    """Write a measurement, replacing an earlier one with the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows[name] = row | {"cores": len(os.sched_getaffinity(0))}
    print(name, json.dumps(rows[name]), flush=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["wire", "engines"])
    parser.add_argument("into", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="for wire")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="for engines")
    args = parser.parse_args()
    for nodes in args.nodes if args.what == "wire" else ():
        wire(args.into, nodes)
    for workload in args.workloads if args.what == "engines" else ():
        engines(args.into, workload)
