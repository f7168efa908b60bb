"""Time client-sampling probabilities at 1,000,000 clients, and the growth of time and memory with their number.

    python benchmarks/clients.py [--repeats 5]

Writes results/samplers/clients.json: median seconds, the solvers' peak memory beyond their input, and the slope of
log seconds and log memory against log N.
"""

import argparse
import json
import platform
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library

from sharding import optimal_inclusion
from sharding.client_sampling import (
    aocs_probabilities,
    mmfl_probabilities,
    plain_sum,
    round_time,
    wireless_probabilities,
)

SIZES = (62_500, 125_000, 250_000, 500_000, 1_000_000)
COHORT, MODELS = 10, 5


def cases(size: int) -> dict[str, Callable[[], object]]:
    """Return the calls to time, all on the same heavy-tailed norms and exponential times."""
    rng = np.random.default_rng(0)
    norms, shares, keep = rng.lognormal(0, 2, size), rng.dirichlet(np.ones(size)), rng.uniform(0.1, 1, size)
    tau, t = rng.exponential(1, size), rng.exponential(1, size)
    seconds, several = COHORT * t + tau, rng.lognormal(0, 2, (size, MODELS))
    budget = size / 10
    return {
        "ocs": lambda: optimal_inclusion(norms, budget),
        "ocs_partial": lambda: optimal_inclusion(norms, budget, keep),
        "aocs": lambda: aocs_probabilities(norms, budget, plain_sum),
        "mmfl": lambda: mmfl_probabilities(several, budget),
        "wireless": lambda: wireless_probabilities(shares, norms, seconds, 1e-3, COHORT),
        "round_time": lambda: round_time(tau, t, size),
    }


def measure(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return (median seconds, peak MB allocated) of a call."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times), peak


def slope(values: list[float]) -> float:
    """Return the slope of log values against log N."""
    return float(np.polyfit(np.log(SIZES), np.log(values), 1)[0])


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="calls over which the median is taken (default: 5)")
    repeats = parser.parse_args().repeats
    rows: dict[str, list[tuple[float, float]]] = {}
    for size in SIZES:
        for name, call in cases(size).items():
            rows.setdefault(name, []).append(measure(call, repeats))
    result: dict[str, object] = {
        "command": "python benchmarks/clients.py",
        "machine": f"{platform.machine()}, numpy {np.__version__}",
        "clients": SIZES,
    }
    print(f"{'':12s}{'seconds at 1e6':>16s}{'peak MB':>10s}{'slopes':>14s}")
    for name, pairs in rows.items():
        seconds, peaks = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        result[name] = {"seconds": seconds, "peak_mb": peaks, "slopes": [slope(seconds), slope(peaks)]}
        print(f"{name:12s}{seconds[-1]:16.3f}{peaks[-1]:10.0f}{slope(seconds):8.2f}{slope(peaks):6.2f}")
    path = Path(__file__).parents[1] / "results" / "samplers" / "clients.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
