"""Measure a federation on Flower: seconds and bytes a round.

It starts real processes on loopback: a SuperLink and 2, 4 and 8 SuperNodes. A relay between them counts the bytes.
Flower's own empty round is the lower bound. Rounds wait for Flower's polls (3 s at a SuperNode, 1 s before a process
starts) and for a new process per message, so the best round is reported. With `--start`, two nodes run the app in
examples/flower_app, in turn with Flower's FedAvg and with `SpectralSharding`, and in turn with Flower's SuperNode and
with that of `sharding.flower.warm`.

    python benchmarks/deployment.py results/deployment [--nodes 2 4 8]
    python benchmarks/deployment.py results/deployment --start [--turns 3]
"""

import json
import os
import shlex
import socket
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Thread
from time import sleep

from measure import save

ROOT = Path(__file__).parents[1]
LOOPBACK = "127.0.0.1"
WARM = (sys.executable, "-m", "sharding.flower.warm")
EMPTY = Path(__file__).parent / "peers" / "empty"  # the app of an empty round
ROUNDS = Path(__file__).parent / "peers" / "rounds"
EXAMPLE = ROOT / "examples" / "flower_app"
STRATEGIES = ("FedAvg", "SpectralSharding")
NODE = {"flower-supernode": ["flower-supernode"], "sharding.flower.warm": WARM}  # the program of a node
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
NODES = (2, 4, 8)
WIDE = [
    *("strategy=collective", "model.width=128", "keep_ratio=0.1", "local.epochs=1", "local.batch_size=32"),
    *("rounds=3", "evaluate_every=3"),
]


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
            Thread(target=self._forward, args=(node, server, "up"), daemon=True).start()
            Thread(target=self._forward, args=(server, node, "down"), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        try:
            while data := source.recv(1 << 16):
                setattr(self, direction, getattr(self, direction) + len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


class Deployment(ExitStack):
    """A SuperLink on loopback and what calls it; all end with the context. Homes and logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.port = folder, free_port()
        self.folder.mkdir(parents=True)
        link = f'[superlink.here]\naddress = "{LOOPBACK}:{self.port}"\ninsecure = true\n'
        (folder / "config.toml").write_text(link, encoding="utf-8")
        command = ["flower-superlink", "--insecure", "--host", LOOPBACK, "--port", str(self.port)]
        self.start("superlink", [*command, "--disable-runtime-dependency-installation"])
        with socket.socket() as caller:
            while caller.connect_ex((LOOPBACK, self.port)):
                sleep(0.2)

    def start(self, name: str, command: Sequence[str], home: str = "") -> subprocess.Popen[bytes]:
        """Start a program in the background."""
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        settings = {"FLWR_HOME": str(self.folder / home), "PYTHONPATH": os.pathsep.join(paths)}
        output = self.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | settings)
        self.callback(process.wait)
        self.callback(process.terminate)
        return process

    def node(self, number: int, port: int, program: Sequence[str] = WARM) -> None:
        """Start a SuperNode that calls this port."""
        command = [*program, "--insecure", "--superlink", f"{LOOPBACK}:{port}", "--port", str(free_port())]
        self.start(f"node-{number}", [*command, "--node-config", f"partition-id={number}"], f"node-{number}")

    def submit(self, app: Path, settings: dict[str, object]) -> subprocess.Popen[bytes]:
        """Submit an app."""
        values = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        return self.start("run", ["flwr", "run", str(app), "here", "--stream", "--run-config", values])


def federated(nodes: int, folder: Path) -> tuple[list[dict[str, float]], list[tuple[int, int]]]:
    """Return the rounds' metrics, and the bytes sent down and up until the end of each."""
    words = [*WIDE, f"clients.count={nodes}", f"clients.per_round={nodes}", f"output={folder / 'run'}"]
    path, passed, lines = folder / "run" / "metrics.jsonl", list[tuple[int, int]](), list[str]()
    with Deployment(folder / "deployment") as deployment:
        relay = Relay(deployment.port)
        for node in range(nodes):
            deployment.node(node, relay.port)
        run = deployment.submit(ROOT, {"config": CONFIG, "overrides": shlex.join(words)})
        ended = False
        while not ended:
            ended = run.poll() is not None
            lines = path.read_text().splitlines() if path.exists() else []
            passed += [(relay.down, relay.up)] * (len(lines) - len(passed))
            sleep(0.1)
    return [json.loads(line) for line in lines], passed


def timed(app: Path, nodes: int, folder: Path, settings: dict[str, object], program: Sequence[str]) -> list[float]:
    """Run an app, and return the seconds of its rounds, which it writes to the `output` of its settings."""
    with Deployment(folder) as deployment:
        for node in range(nodes):
            deployment.node(node, deployment.port, program)
        deployment.submit(app, settings).wait()
    return [float(seconds) for seconds in Path(str(settings["output"])).read_text().split()]


def in_turn(into: Path, turns: int, rounds: int = 4) -> None:
    """Measure the seconds of rounds of FedAvg and of ours, on nodes that start apps cold and warm, and write them."""
    scratch, rows, cores = Path(mkdtemp()), {}, len(os.sched_getaffinity(0))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(EXAMPLE), os.environ.get("PYTHONPATH", "")])
    for turn, strategy, node in product(range(turns), STRATEGIES, NODE):
        folder = scratch / f"{strategy}-{node}-{turn}"
        settings = {"strategy": strategy, "rounds": rounds, "output": str(folder / "seconds")}
        row = {"strategy": strategy, "node": node, "nodes": 2, "seconds": [], "cores": cores}
        row = rows.setdefault(f"{strategy}, {node}", row)
        row["seconds"] += timed(ROUNDS, 2, folder, settings, NODE[node])[1:]  # the first one carries the app
        print(turn, strategy, node, row["seconds"], flush=True)
    rmtree(scratch)
    save(into / "start.json", rows)


def measure(into: Path, nodes: int) -> None:
    """Measure the rounds of this many nodes and write the results."""
    scratch = Path(mkdtemp())
    lines, passed = federated(nodes, scratch / "nodes")
    settings = {"nodes": nodes, "rounds": len(lines), "output": str(scratch / "empty" / "seconds")}
    floor = timed(EMPTY, nodes, scratch / "empty", settings, WARM)
    rmtree(scratch)
    rounds = range(1, len(lines))  # the first one carries the app, and nodes are still starting
    sent = [tuple(total - previous for total, previous in zip(passed[t], passed[t - 1], strict=True)) for t in rounds]
    shards = [(lines[t]["bytes_down"], lines[t]["bytes_up"]) for t in rounds]
    path = into / "wire.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows[str(nodes)] = {
        "nodes": nodes,
        "overrides": [*WIDE, f"clients.per_round={nodes}"],
        "seconds": [lines[t]["seconds"] for t in rounds],
        "seconds_empty": floor[1:],
        "shard_bytes": sum(shards[0]),
        "wire_over": [sum(measured) / sum(shard) - 1 for measured, shard in zip(sent, shards, strict=True)],
        "cores": len(os.sched_getaffinity(0)),
    }
    print(nodes, json.dumps(rows[str(nodes)]), flush=True)
    save(path, rows)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--start", action="store_true", help="compare how nodes start apps")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    if args.start:
        in_turn(args.into, args.turns)
    else:
        for nodes in args.nodes:
            measure(args.into, nodes)
