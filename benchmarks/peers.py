"""Time the same dense FedAvg workload on this project, BlazeFL, Flower's simulation and pfl-research.

The workload is pfl-research's published CIFAR-10 benchmark (see peers/workload.py). Each peer is installed into its own
virtual environment under ``~/.cache/spectral-sharding-peers``, and used as its examples use it; Flower also with one
core per client instead of its default, two, and BlazeFL with threads too. This project also trains shards of a fifth.
A plain loop without federation (peers/on_plain.py) shows what the arithmetic of the whole model alone takes. They take
turns on the same cores. The figures are the median and the slowest round and, from another run, the peak memory of all
processes (proportional set size, which counts shared memory once).

    python benchmarks/peers.py [--data data] [--rounds 5] [--turns 2]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import run_and_watch, save

sys.path.insert(0, str(Path(__file__).parents[1]))

from sharding.rng import generator
from train.data import default_root, load_dataset

ROOT = Path(__file__).parents[1]

TORCH = f"torch=={torch.__version__.partition('+')[0]}"  # the same for all
PEERS = {  # the interpreter and the packages
    "flower": (sys.executable, ["flwr[simulation]", TORCH, "numpy"]),
    "pfl": (sys.executable, ["pfl", TORCH, "numpy"]),
    "blazefl": ("python3.12", ["blazefl[reproducibility,contrib]", TORCH, "numpy"]),
}
CONTENDERS = {  # name -> simulator, and whether PEERS_TUNED is set
    "ours": ("ours", False),
    "ours_shards_of_a_fifth": ("ours", True),
    "blazefl": ("blazefl", False),
    "blazefl_threads": ("blazefl", True),
    "flower": ("flower", False),
    "flower_one_core_each": ("flower", True),
    "pfl": ("pfl", False),
    "plain": ("plain", False),
}
OUTPUT = ROOT / "results" / "engines" / "peers.json"


def python_of(peer: str, folder: Path) -> str:
    """Return the peer's interpreter, after installing the peer if it is missing."""
    if peer not in PEERS:
        return sys.executable
    environment, (interpreter, packages) = folder / peer, PEERS[peer]
    python = environment / "bin" / "python"
    if not (environment / "installed").exists():
        subprocess.run([interpreter, "-m", "venv", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (environment / "installed").touch()
    return str(python)


def write_data(root: Path, folder: Path) -> None:
    """Write CIFAR-10's training images in the order in which the users own them."""
    images = load_dataset("cifar10", root=root).train
    order = generator(0, "peers").permutation(len(images))
    images.inputs.numpy()[order].tofile(folder / "images")
    images.targets.numpy()[order].astype(np.int64).tofile(folder / "classes")


def run(peer: str, tuned: bool, python: str, data: Path, rounds: int, watched: bool = False) -> dict[str, Any]:
    """Run one simulator once; return its seconds per round and, if it is watched, which slows it, its peak memory."""
    environment = {
        **os.environ,
        "PEERS_DATA": str(data),
        "PEERS_ROUNDS": str(rounds),
        "PEERS_TUNED": "1" if tuned else "",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "peers"), str(ROOT)]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "local",  # else Flower joins a cluster that runs here
    }
    command = [python, str(ROOT / "benchmarks" / "peers" / f"on_{peer}.py")]
    lines, peak = run_and_watch(command, environment, data, 0.5 if watched else None)
    results = [json.loads(line.partition("RESULT ")[2]) for line in lines if "RESULT " in line]
    if not results:
        raise RuntimeError(f"{peer} ended without a result:\n" + "\n".join(lines[-30:]))
    return results[0] | ({"peak_memory_mb": peak} if watched else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_root(), help="folder that holds cifar10/")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "spectral-sharding-peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        write_data(args.data, Path(folder))
        simulators = {
            name: (peer, tuned, python_of(peer, args.environments), Path(folder))
            for name, (peer, tuned) in CONTENDERS.items()
        }
        for _ in range(args.turns):
            for name, simulator in simulators.items():
                runs[name].append(run(*simulator, rounds=args.rounds))
                print(name, json.dumps(runs[name][-1]), flush=True)
        peaks = {name: run(*one, rounds=1, watched=True)["peak_memory_mb"] for name, one in simulators.items()}
    pace = {name: median(second for one in results for second in one["seconds"]) for name, results in runs.items()}
    summary = {
        name: {
            "seconds_per_round": pace[name],
            "slowest_round": max(second for one in results for second in one["seconds"]),
            "times_plain": pace[name] / pace["plain"],
            "peak_memory_mb": peaks[name],
            "runs": results,
        }
        for name, results in runs.items()
    }
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": platform.processor() or platform.machine(),
        "device": "cpu",
    }
    save(OUTPUT, {"machine": machine, "simulators": summary})
    print(
        json.dumps({peer: {k: v for k, v in entry.items() if k != "runs"} for peer, entry in summary.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
