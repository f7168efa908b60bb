"""Time factorized layers against dense ones, and `factorize` against an SVD of every layer.

The figures are ratios of processor time on one thread. The two sides of a ratio take turns, and each is the best of
many passes, so other load on the machine affects neither. The ratio of multiply-adds beside it is what a layer would
reach if its small products ran as fast as the large one. Dense layers can be slower than that, because their gradient
takes new memory pages in every pass. Ω's share of a pass is measured by a forward and backward pass through Ω only.

    python benchmarks/layers.py [results/layers/layers.json] [--quick]
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from timm import create_model
from torch import Tensor, nn

from sharding import factorize
from sharding.factorization import num_terms, rank_of
from sharding.factorization.terms import Cost
from sharding.layers import FactorizedConv2d, FactorizedLayer, factorized_type

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 4096x4096, batch 64": (lambda: nn.Linear(4096, 4096), (64, 4096)),
    "linear 4096x4096, batch 1": (lambda: nn.Linear(4096, 4096), (1, 4096)),
    "linear 768x3072, 1576 tokens": (lambda: nn.Linear(768, 3072), (8, 197, 768)),
    "conv 256x256 3x3, 16x16, batch 16": (lambda: nn.Conv2d(256, 256, 3, padding=1), (16, 256, 16, 16)),
    "conv 256x256 3x3, 16x16, batch 1": (lambda: nn.Conv2d(256, 256, 3, padding=1), (1, 256, 16, 16)),
}
RATIOS = (0.1, 0.2)
BARS = {  # upper bounds of a forward and backward pass, as a share of the dense layer's time
    ("linear 4096x4096, batch 64", 0.1): 0.18,
    ("linear 4096x4096, batch 64", 0.2): 0.34,
    ("conv 256x256 3x3, 16x16, batch 16", 0.1): 0.18,
    ("conv 256x256 3x3, 16x16, batch 16", 0.2): 0.34,
}
OMEGA_BAR = 0.03  # of a factorized layer's pass, at any batch
FACTORIZE_BAR = 4.0  # times as fast as an SVD of every layer


def main(words: Sequence[str]) -> int:
    """Measure, print and write the results."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    torch.set_num_threads(1)
    quick = "--quick" in words
    results: dict[str, object] = {"torch": torch.__version__, "threads": 1}
    results["layers"] = {name: measure_layer(name, 0.3 if quick else 2.0) for name in LAYERS}
    results["factorize"] = measure_factorize(1.0 if quick else 30.0)
    text = json.dumps(results, indent=1)
    print(text)
    into = next((word for word in words if not word.startswith("--")), None)
    if into:
        Path(into).write_text(text + "\n", encoding="utf-8")
    return 0


def measure_layer(name: str, seconds: float) -> dict[str, object]:
    """Compare a dense layer, factorized ones, and only Ω, for this many seconds each."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    dense, x = make(), torch.randn(shape)
    passes = {"dense": one_pass(dense, x)}
    for ratio in RATIOS:
        layer = factorized_type(dense)
        assert layer is not None
        small = layer.empty_like(dense, num_terms(rank_of(dense), ratio))
        small.reset_parameters()
        passes[f"{ratio}"] = one_pass(small, x)
        passes[f"{ratio} omega"] = one_pass(Omega(small), scaled_by(small, x))
    best = in_turns(passes, seconds)
    report: dict[str, object] = {"dense_ms": round(1e3 * best["dense"], 3)}
    cost = Cost.of(dense)
    for ratio in RATIOS:
        mine, omega = best[f"{ratio}"], best[f"{ratio} omega"]
        report[f"{ratio}"] = {
            "of_dense": round(mine / best["dense"], 4),
            "bar": BARS.get((name, ratio)),
            "multiply_adds": round(num_terms(rank_of(dense), ratio) * cost.term / cost.whole, 4),
            "omega": round(omega / mine, 4),
            "omega_bar": OMEGA_BAR,
        }
    return report


def measure_factorize(seconds: float) -> dict[str, float]:
    """Compare `factorize` of a ViT-B with an SVD of every layer that it replaces."""
    torch.manual_seed(0)
    model = create_model("vit_base_patch16_224")
    names = factorize(create_model("vit_tiny_patch16_224"), 0.1).factorize_report.layers
    weights = [model.get_submodule(name).weight.detach() for name in names]

    def decompose() -> None:
        for weight in weights:
            torch.linalg.svd(weight, full_matrices=False)

    best = in_turns({"factorize": lambda: factorize(model, 0.1), "svd": decompose}, seconds)
    return {
        "svd_s": round(best["svd"], 2),
        "factorize_s": round(best["factorize"], 2),
        "faster": round(best["svd"] / best["factorize"], 2),
        "bar": FACTORIZE_BAR,
    }


class Omega(nn.Module):
    """Only the multiplication by Ω."""

    def __init__(self, layer: FactorizedLayer) -> None:
        super().__init__()
        self.multipliers = layer.multipliers

    def forward(self, scaled: Tensor) -> Tensor:
        """Multiply (…, n) by ω."""
        return scaled * self.multipliers


def scaled_by(layer: FactorizedLayer, x: Tensor) -> Tensor:
    """Return the tensor that a layer multiplies by Ω: U in a convolution, the terms of a sample in a linear layer."""
    if isinstance(layer, FactorizedConv2d):
        return layer.u.detach()
    return torch.randn(*x.shape[:-1], layer.num_terms)


def one_pass(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a forward and backward pass."""
    x = x.clone().requires_grad_()
    gradient = torch.randn_like(layer(x))

    def run() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(gradient)

    return run


def in_turns(tasks: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the least processor time of each, in seconds. They take turns, for this many seconds each."""
    best = dict.fromkeys(tasks, float("inf"))
    spent = 0.0
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
