"""Time factorized layers against dense ones, and client-sampling probabilities of up to a million clients.

Layers: ratios of processor time of a forward and backward pass on one thread. The two sides of a ratio take turns, and
each is the best of many passes, so other load on the machine affects neither. Beside it is the ratio of multiply-adds.
`factorize` is compared with an SVD of every layer.

Samplers: median seconds, peak memory beyond the input, and the slopes of their logarithms against log N.

    python benchmarks/library.py layers [results/layers/layers.json] [--seconds 2]
    python benchmarks/library.py samplers [results/samplers/clients.json]
"""

import argparse
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library

import numpy as np
import torch
from measure import save, seconds
from timm import create_model
from torch import Tensor, nn

from sharding import factorize, optimal_inclusion
from sharding.client_sampling import (
    aocs_probabilities,
    mmfl_probabilities,
    plain_sum,
    round_time,
    wireless_probabilities,
)
from sharding.factorization.terms import Cost
from sharding.layers import factorized_type
from sharding.layers.decomposition import form_of
from sharding.terms.strategies import num_terms

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 4096x4096, batch 64": (lambda: nn.Linear(4096, 4096), (64, 4096)),
    "linear 4096x4096, batch 1": (lambda: nn.Linear(4096, 4096), (1, 4096)),
    "linear 768x3072, 1576 tokens": (lambda: nn.Linear(768, 3072), (8, 197, 768)),
    "conv 256x256 3x3, 16x16, batch 16": (lambda: nn.Conv2d(256, 256, 3, padding=1), (16, 256, 16, 16)),
    "conv 256x256 3x3, 16x16, batch 1": (lambda: nn.Conv2d(256, 256, 3, padding=1), (1, 256, 16, 16)),
}
RATIOS = (0.1, 0.2)
CLIENTS = (62_500, 125_000, 250_000, 500_000, 1_000_000)
COHORT, MODELS = 10, 5


def time_layers(seconds: float) -> dict[str, object]:
    """Return each layer's ratios at each keep ratio, and `factorize` of a ViT-B against an SVD of its layers."""
    torch.set_num_threads(1)
    model = create_model("vit_base_patch16_224")
    names = factorize(create_model("vit_tiny_patch16_224"), 0.1).factorize_report.layers
    weights = [model.get_submodule(name).weight.detach() for name in names]
    svd = lambda: [torch.linalg.svd(weight, full_matrices=False) for weight in weights]  # noqa: E731
    layers = {name: time_layer(make(), torch.randn(shape), seconds) for name, (make, shape) in LAYERS.items()}
    best = in_turns({"factorize_s": lambda: factorize(model, 0.1), "svd_s": svd}, 15 * seconds)
    return {
        "torch": torch.__version__,
        "threads": 1,
        "layers": layers,
        "factorize": best | {"faster": best["svd_s"] / best["factorize_s"]},
    }


def time_layer(dense: nn.Module, x: Tensor, seconds: float) -> dict[str, object]:
    """Compare a dense layer and factorized ones, for this many seconds each."""
    passes, cost, kind = {"dense": one_pass(dense, x)}, Cost.of(dense), factorized_type(dense)
    assert kind is not None
    for ratio in RATIOS:
        small = kind.from_dense(dense, num_terms(form_of(dense).rank, ratio))
        passes[f"{ratio}"] = one_pass(small, x)
    best = in_turns(passes, seconds)
    shares = {
        f"{ratio}": {
            "of_dense": best[f"{ratio}"] / best["dense"],
            "multiply_adds": num_terms(form_of(dense).rank, ratio) * cost.term / cost.whole,
        }
        for ratio in RATIOS
    }
    return {"dense_ms": 1e3 * best["dense"], **shares}


def one_pass(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a forward and backward pass."""
    x = x.clone().requires_grad_()
    inputs = [x, *layer.parameters()]
    gradient = torch.randn_like(layer(x))
    return lambda: torch.autograd.grad(layer(x), inputs, gradient) and None


def in_turns(tasks: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the least processor time of each, in seconds. They take turns, for this many seconds each."""
    best, spent = dict.fromkeys(tasks, float("inf")), 0.0
    while spent < seconds * len(tasks):
        for name, task in tasks.items():
            start, repeats = process_time(), 0
            while repeats == 0 or process_time() - start < 0.02:
                task()
                repeats += 1
            took = process_time() - start
            best[name] = min(best[name], took / repeats)
            spent += took
    return best


def time_samplers() -> dict[str, object]:
    """Return seconds and megabytes by number of clients, and their slopes."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for size in CLIENTS:
        for name, call in samplers(size).items():
            rows.setdefault(name, []).append(measure(call))
    logs = np.log(CLIENTS)
    return {"clients": CLIENTS} | {
        name: {
            "seconds": [took for took, _ in pairs],
            "peak_mb": [peak for _, peak in pairs],
            "slopes": [float(np.polyfit(logs, np.log(column), 1)[0]) for column in zip(*pairs, strict=True)],
        }
        for name, pairs in rows.items()
    }


def samplers(size: int) -> dict[str, Callable[[], object]]:
    """Return the calls to time, all on the same heavy-tailed norms and exponential times."""
    rng = np.random.default_rng(0)
    norms, shares, keep = rng.lognormal(0, 2, size), rng.dirichlet(np.ones(size)), rng.uniform(0.1, 1, size)
    tau, t = rng.exponential(1, size), rng.exponential(1, size)
    seconds, several, budget = COHORT * t + tau, rng.lognormal(0, 2, (size, MODELS)), size / 10
    return {
        "ocs": partial(optimal_inclusion, norms, budget),
        "ocs_partial": partial(optimal_inclusion, norms, budget, keep),
        "aocs": partial(aocs_probabilities, norms, budget, plain_sum),
        "mmfl": partial(mmfl_probabilities, several, budget),
        "wireless": partial(wireless_probabilities, shares, norms, seconds, 1e-3, COHORT),
        "round_time": partial(round_time, tau, t, size),
    }


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Return (median seconds, peak MB allocated) of a call."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return seconds(call, 5), peak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layers", "samplers"])
    parser.add_argument("into", type=Path, nargs="?", help="file to write, as JSON")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each layer (default: 2)")
    args = parser.parse_args()
    results = time_layers(args.seconds) if args.what == "layers" else time_samplers()
    print(json.dumps(results, indent=1))
    if args.into:
        save(args.into, results)
