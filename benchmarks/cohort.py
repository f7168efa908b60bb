"""Time the engines: seconds a round of `sequential` and `processes`.

The engines take turns, round by round, on the same plans, so other load on the machine affects both equally. The
figures are medians over rounds, and ratios to `sequential`. Peak memory is measured in a separate process per engine.

    python benchmarks/cohort.py [--rounds 7] [--data data]
    python benchmarks/cohort.py --device cuda      # the same on GPUs
    python benchmarks/cohort.py --nodes 1,2        # large cohorts on Ray, with so many nodes of one core each
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from measure import resident, run_and_watch, save

sys.path.insert(0, str(Path(__file__).parents[1]))

from train.callbacks import Callback, Plans
from train.config.schema import load_config
from train.data import default_root
from train.experiment.assembly import assemble
from train.experiment.experiment import Experiment
from train.experiment.metrics import RoundMetrics
from train.rounds import run_rounds

ROOT = Path(__file__).parents[1]

OUTPUT = ROOT / "results" / "engines" / "cohort.json"
ENGINE_NAMES = ("sequential", "processes")

MANY = ("rounds=1000", "evaluate_every=1000")  # no timed round is evaluated
QUICKSTART = ["configs/quickstart.yaml", "strategy=collective"]
# One local epoch and small clients; more would only take longer.
SMALL = ["local.epochs=1", "data.partition=iid"]
CPU_CASES = {"quickstart": QUICKSTART, "gpt": ["configs/shakespeare_gpt.yaml", *SMALL]}
GPU_CASES = {
    "resnet18": ["configs/cifar10_resnet18.yaml", "local.batch_size=32", "clients.per_round=10"],
    "cct": ["configs/cifar100_cct.yaml"],
    "gpt": ["configs/shakespeare_gpt.yaml"],
}
CLUSTER_CASES = {  # the quickstart's model; one local epoch, and 1 or 2 digits or 5 small color images a client
    "100 of 1,000 clients": [*QUICKSTART, "clients.count=1000", "clients.per_round=100", *SMALL],
    "1,000 of 1,000 clients": [*QUICKSTART, "clients.count=1000", "clients.per_round=1000", *SMALL],
    "1,000 of 10,000 clients": [
        *(*QUICKSTART, "data=cifar10", "clients.count=10000", "clients.per_round=1000", *SMALL),
    ],
}


def make(case: list[str], engine: str, args: argparse.Namespace) -> Experiment:
    """Assemble a case for one engine."""
    root = [] if "quickstart" in case[0] and "data=cifar10" not in case else [f"data.root={args.data}"]
    config = load_config(ROOT / case[0], [*case[1:], *root, f"engine={engine}", f"device={args.device}", *MANY])
    experiment = assemble(config)
    experiment.start()
    return experiment


class Once(Callback):
    """Ends a run after one round, in which no client may fail."""

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool:
        """End the run."""
        assert not metrics.num_failed
        return True


def time_round(experiment: Experiment, t: int, threads: int = 1) -> float:
    """Run round t and return its seconds."""
    torch.set_num_threads(threads)
    start = perf_counter()
    run_rounds(experiment, t, [Once()])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - start


def compare(case: list[str], args: argparse.Namespace) -> dict[str, object]:
    """Return the seconds per round of every engine, and how much faster than `sequential` each is.

    `sequential` has torch's default threads and, as `sequential_1_thread`, one: the faster of the two is the baseline.
    """
    default = torch.get_num_threads()
    runs = {name: (make(case, name, args), default if name == "sequential" else 1) for name in ENGINE_NAMES}
    if args.device != "cuda":
        runs["sequential_1_thread"] = make(case, "sequential", args), 1
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for t in range(args.rounds + 1):
        for name, (experiment, threads) in runs.items():
            seconds[name].append(time_round(experiment, t, threads))
    for experiment, _ in runs.values():
        experiment.close()
    torch.set_num_threads(default)
    medians = {name: median(values[1:]) for name, values in seconds.items()}
    base = min(value for name, value in medians.items() if name.startswith("sequential"))
    return {
        "seconds_per_round": medians,
        "times_sequential": {name: base / value for name, value in medians.items()},
        "rounds": seconds,
    }


def peak_memory(case: str, engine: str, args: argparse.Namespace) -> float:
    """Return the peak memory in MB of a process that runs two rounds, with its workers; on a GPU, that of the GPU."""
    command = [sys.executable, __file__, "--memory-of", case, engine, "--device", args.device, "--data", str(args.data)]
    lines, peak = run_and_watch(command, os.environ, interval=0.1)
    return float(lines[-1]) if args.device == "cuda" else peak


def play_two_rounds(case: str, engine: str, args: argparse.Namespace) -> None:
    """Run the rounds that `peak_memory` watches."""
    cases = GPU_CASES if args.device == "cuda" else CPU_CASES
    experiment = make(cases[case], engine, args)
    for t in range(2):
        time_round(experiment, t)
    experiment.close()
    if args.device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)


def cluster(args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Return for each case and number of nodes the seconds of a round, and the peak memory of head and worker in MB."""
    results: dict[str, dict[str, object]] = {}
    for name in CLUSTER_CASES:
        for nodes in args.nodes:
            command = [sys.executable, __file__, "--cluster-of", name, nodes, "--rounds", str(args.rounds)]
            ended = subprocess.run([*command, "--data", str(args.data)], stdout=subprocess.PIPE, text=True, check=True)
            results.setdefault(name, {})[nodes] = result = json.loads(ended.stdout.splitlines()[-1])
            print(name, nodes, json.dumps(result), flush=True)
    return results


def play_on_cluster(case: str, nodes: int, args: argparse.Namespace) -> None:
    """Run rounds on a cluster of so many nodes, made here, and print what `cluster` collects."""
    import ray  # noqa: PLC0415  # an extra
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    one = {"num_cpus": 1, "object_store_memory": 2**28}
    local_cluster = Cluster(initialize_head=True, head_node_args=one | {"include_dashboard": False})
    for _ in range(nodes - 1):
        local_cluster.add_node(**one)
    os.environ["RAY_ADDRESS"] = local_cluster.address
    experiment = make(CLUSTER_CASES[case], "ray", args)
    seconds = [time_round(experiment, t) for t in range(args.rounds + 1)][1:]
    peaks = ray.get([ray.remote(resident).remote("VmHWM") for _ in range(10 * nodes)])
    head, worker = (peak / 2**20 for peak in (resident("VmHWM"), max(peaks)))
    print(json.dumps({"seconds": median(seconds), "head_mb": head, "worker_mb": worker}))
    ray.shutdown()
    local_cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", type=Path, default=default_root())
    parser.add_argument("--memory-of", nargs=2, metavar=("CASE", "ENGINE"), help=argparse.SUPPRESS)
    parser.add_argument("--cluster-of", nargs=2, metavar=("CASE", "NODES"), help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=lambda text: text.split(","), help="measure clusters of so many nodes instead")
    args = parser.parse_args()
    if args.cluster_of:
        play_on_cluster(args.cluster_of[0], int(args.cluster_of[1]), args)
        return
    if args.nodes:
        save(OUTPUT.with_name("cluster.json"), cluster(args))
        return
    if args.memory_of:
        play_two_rounds(*args.memory_of, args)
        return
    cases = GPU_CASES if args.device == "cuda" else CPU_CASES
    results: dict[str, object] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    for name, case in cases.items():
        result = compare(case, args) | {"peak_memory_mb": {e: peak_memory(name, e, args) for e in ENGINE_NAMES}}
        results[name] = result
        print(name, json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1), flush=True)
    save(OUTPUT if args.device == "cpu" else OUTPUT.with_name("cohort_cuda.json"), results)


if __name__ == "__main__":
    main()
