"""Time the planner on ResNet-18 (r = 0.1, 10 clients, CPS), against a reference timed in the same run, as JSON.

The reference uses existing tools: `torch.linalg.svd` in float32 for each layer, and R's `UPmaxentropy` (package
`sampling`) for each layer and client.

    python benchmarks/planner.py [--repeats 7] [--device cuda]
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from measure import seconds

sys.path.insert(0, str(Path(__file__).parents[1]))  # `models` runs from a checkout

from models import build_model
from sharding import ShardPlanner, UserError, collective_inclusion, optimal_inclusion, shardable_layers
from sharding.matrices.spectrum import decompose
from sharding.rounds.plan import Client
from sharding.terms.designs import fit
from sharding.terms.strategies import num_terms

KEEP_RATIO, NUM_CLIENTS = 0.1, 10


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


def main() -> None:
    """Print the timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="calls over which the median is taken (default: 7)")
    parser.add_argument("--device", default="cpu", help="device of the model: cpu or cuda (default: cpu)")
    args = parser.parse_args()
    gpu = f", {torch.cuda.get_device_name()}" if args.device.startswith("cuda") else ""
    result = {"machine": f"{platform.machine()}, {torch.get_num_threads()} threads{gpu}", "torch": torch.__version__}
    for strategy in ("unbiased", "collective"):
        phases = time_planner(strategy, args.repeats, args.device)
        phases["ratio"] = (phases["reference_svd"] + phases["reference_r_draw"]) / phases["plan"]
        result[strategy] = phases
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
