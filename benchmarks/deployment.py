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
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Thread
from time import sleep

from measure import save

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own programs

from tests.sharding.flower.programs import LOOPBACK, ROOT, WARM, Programs

EMPTY = Path(__file__).parent / "peers" / "empty"  # the app of an empty round
ROUNDS = Path(__file__).parent / "peers" / "rounds"
STRATEGIES = ("FedAvg", "SpectralSharding")
NODE = {"flower-supernode": ("flower-supernode",), "sharding.flower.warm": WARM}  # the program of a node
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


def run_config(settings: Mapping[str, object]) -> str:
    """Return settings as `flwr run` takes them."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def federated(nodes: int, folder: Path) -> tuple[list[dict[str, float]], list[tuple[int, int]]]:
    """Return the rounds' metrics, and the bytes sent down and up until the end of each."""
    words = [*WIDE, f"clients.count={nodes}", f"clients.per_round={nodes}", f"output={folder / 'run'}"]
    path, passed, lines = folder / "run" / "metrics.jsonl", list[tuple[int, int]](), list[str]()
    folder.mkdir()
    with Programs(folder / "programs") as programs:
        programs.superlink()
        relay = Relay(programs.port)
        for node in range(nodes):
            programs.node(node, port=relay.port)
        run = programs.submit(ROOT, run_config({"config": CONFIG, "overrides": shlex.join(words)}))
        ended = False
        while not ended:
            ended = run.poll() is not None
            lines = path.read_text().splitlines() if path.exists() else []
            passed += [(relay.down, relay.up)] * (len(lines) - len(passed))
            sleep(0.1)
    return [json.loads(line) for line in lines], passed


def timed(app: Path, nodes: int, folder: Path, settings: dict[str, object], program: Sequence[str]) -> list[float]:
    """Run an app, and return the seconds of its rounds, which it writes to the `output` of its settings."""
    with Programs(folder) as programs:
        programs.superlink()
        for node in range(nodes):
            programs.node(node, program=program)
        programs.submit(app, run_config(settings)).wait()
    return [float(seconds) for seconds in Path(str(settings["output"])).read_text().split()]


def in_turn(into: Path, turns: int, rounds: int = 4) -> None:
    """Measure the seconds of rounds of FedAvg and of ours, on nodes that start apps cold and warm, and write them."""
    scratch, rows, cores = Path(mkdtemp()), {}, len(os.sched_getaffinity(0))
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
