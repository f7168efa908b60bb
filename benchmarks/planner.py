"""Time the planner on ResNet-18 (r = 0.1, 10 clients, CPS), against a reference timed in the same run.

The reference uses existing tools: `torch.linalg.svd` in float32 for each layer, and R's `UPmaxentropy` (package
`sampling`) for each layer and client. The program also prints how solvers and designs grow with N.

    python benchmarks/planner.py [--json] [--repeats 7] [--device cuda]
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # `models` runs from a checkout

from models import build_model
from sharding import (
    ShardPlanner,
    UserError,
    collective_inclusion,
    optimal_inclusion,
    shardable_layers,
    successive_inclusion,
)
from sharding.designs import fit
from sharding.factorization import num_terms
from sharding.inclusion import schatten_inclusion
from sharding.planner import Client
from sharding.svd.spectrum import Choose, Spectrum, decompose

KEEP_RATIO, NUM_CLIENTS = 0.1, 10
SIZES = (128, 256, 512, 1024, 2048, 4096)
DESIGNS = ("cps", "brewer", "minimum_support")


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, with its work on the GPU, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return median(times[1:])


def time_planner(strategy: str, repeats: int, device: str) -> dict[str, float]:
    """Return the median seconds of a whole plan and of its phases."""
    model = build_model("resnet18_gn", input_shape=(3, 32, 32), num_classes=10).to(device)
    matrices = {name: layer.weight.detach().flatten(1) for name, layer in shardable_layers(model).items()}
    magnitudes = [spectrum.magnitudes.cpu().numpy() for spectrum in decompose(matrices).values()]
    terms = [num_terms(len(values), KEEP_RATIO) for values in magnitudes]
    planner = ShardPlanner(strategy)
    budgets: dict[Client, float] = dict.fromkeys(range(NUM_CLIENTS), KEEP_RATIO)

    def solve() -> list[np.ndarray]:
        if strategy == "unbiased":
            return [optimal_inclusion(values, n) for values, n in zip(magnitudes, terms, strict=True)]
        return [collective_inclusion(values, n, NUM_CLIENTS)[0] for values, n in zip(magnitudes, terms, strict=True)]

    inclusions = solve()
    designs = [fit(inclusion) for inclusion in inclusions]
    rng = np.random.default_rng(0)
    phases = {
        "spectra": seconds(lambda: decompose(matrices), repeats),
        "inclusion": seconds(solve, repeats),
        "fit": seconds(lambda: [fit(inclusion) for inclusion in inclusions], repeats),
        "draw": seconds(lambda: [design.draw(rng) for design in designs for _ in range(NUM_CLIENTS)], repeats),
        "plan": seconds(lambda: planner.plan(model, budgets), repeats),
    }
    spectra = decompose(matrices)

    def chosen(_: object, choose: Choose) -> dict[str, Spectrum]:
        indices = {name: choose(name, its.magnitudes) for name, its in spectra.items()}
        return {name: Spectrum(its.magnitudes, indices[name], *its.cut(indices[name])) for name, its in spectra.items()}

    with patch("sharding.planner.decompose", chosen):
        phases["plan_without_spectra"] = seconds(lambda: planner.plan(model, budgets), repeats)
    return phases | time_reference(matrices, inclusions, repeats)


def time_reference(matrices: dict[str, torch.Tensor], inclusions: list[np.ndarray], repeats: int) -> dict[str, float]:
    """Return the seconds of SVDs layer by layer, and of R's draws; NaN without R."""
    svd = seconds(lambda: [torch.linalg.svd(matrix, full_matrices=False) for matrix in matrices.values()], repeats)
    try:
        r_designs = [fit(inclusion, "r_cps") for inclusion in inclusions]
    except UserError as error:
        print(error, file=sys.stderr)
        return {"reference_svd": svd, "reference_r_draw": float("nan")}
    rng = np.random.default_rng(0)
    start = perf_counter()  # it takes minutes, so once
    for design in r_designs:
        for _ in range(NUM_CLIENTS):
            design.draw(rng)
    return {"reference_svd": svd, "reference_r_draw": perf_counter() - start}


def time_growth(repeats: int) -> dict[str, dict[str, float]]:
    """Return milliseconds at each N (n = N/10, λᵢ = i^−½), and the slope of their logarithm against log N."""
    solvers: dict[str, Callable[[np.ndarray, int], object]] = {
        "optimal": optimal_inclusion,
        "collective": partial(collective_inclusion, num_clients=NUM_CLIENTS),
        "schatten": schatten_inclusion,
        "successive": lambda magnitudes, n: successive_inclusion(magnitudes**4, n),
    }
    growth: dict[str, list[float]] = {}
    for size in SIZES:
        magnitudes, n = np.arange(1, size + 1) ** -0.5, -(-size // 10)
        inclusion, rng = optimal_inclusion(magnitudes, n), np.random.default_rng(0)
        calls: dict[str, Callable[[], object]] = {name: partial(f, magnitudes, n) for name, f in solvers.items()}
        for name in DESIGNS:
            calls[f"{name} fit"] = partial(fit, inclusion, name)
            calls[f"{name} draw"] = partial(fit(inclusion, name).draw, rng)
        for name, call in calls.items():
            growth.setdefault(name, []).append(seconds(call, repeats))
    return {
        name: {str(size): 1e3 * value for size, value in zip(SIZES, row, strict=True)}
        | {"slope": float(np.polyfit(np.log(SIZES), np.log(row), 1)[0])}
        for name, row in growth.items()
    }


def main() -> None:
    """Print the timings as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=7, help="calls over which the median is taken (default: 7)")
    parser.add_argument("--device", default="cpu", help="device of the model: cpu or cuda (default: cpu)")
    args = parser.parse_args()
    gpu = f", {torch.cuda.get_device_name()}" if args.device.startswith("cuda") else ""
    result = {"machine": f"{platform.machine()}, {torch.get_num_threads()} threads{gpu}", "torch": torch.__version__}
    for strategy in ("unbiased", "collective"):
        phases = time_planner(strategy, args.repeats, args.device)
        phases["ratio"] = (phases["reference_svd"] + phases["reference_r_draw"]) / phases["plan"]
        result[strategy] = phases
    result["growth_ms"] = time_growth(args.repeats)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for strategy in ("unbiased", "collective"):
        print(f"ResNet-18, r = {KEEP_RATIO}, {NUM_CLIENTS} clients, CPS, {strategy}")
        for phase, value in result[strategy].items():
            print(f"  {phase:22s} {value:10.1f} ×" if phase == "ratio" else f"  {phase:22s} {1e3 * value:10.1f} ms")
    print(f"{'ms at N =':22s}" + "".join(f"{size:>10d}" for size in SIZES) + "     slope")
    for name, row in result["growth_ms"].items():
        print(f"{name:22s}" + "".join(f"{row[str(size)]:10.3f}" for size in SIZES) + f"{row['slope']:10.2f}")


if __name__ == "__main__":
    main()
