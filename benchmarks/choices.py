"""Measure what `train/engines/choices.py` decides by rule, and tell what following the rule costs.

Convolutions of random shapes there and back in each of the three ways, and clients of small models trained together and
one by one, all with one thread. The rules' numbers are to be read off the raw figures; what is printed is how much
slower than the fastest way the rule's is.

    python benchmarks/choices.py [--seconds 240]
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from models import build_model
from sharding import ShardPlanner
from train.data import Dataset, Split
from train.data.dataset import flip, standardize, unchanged
from train.engines import Job
from train.engines.choices import convolution_way, measure, pays_together
from train.engines.convolution import WAYS, Geometry
from train.engines.sequential import SequentialEngine
from train.engines.trial import GAIN, Trial
from train.local import ClientData
from train.sections import LocalConfig

OUTPUT = Path(__file__).parents[1] / "results" / "engines" / "choices.json"
LARGEST = 3e9  # operations of a convolution that is worth the while

CLIENTS, BATCHES, CHANNELS, SIZES = (5, 5, 5, 2), (8, 10, 16, 32), (1, 3, 8, 16, 32, 64, 128), (4, 7, 8, 14, 16, 28, 32)
TERMS, KERNELS, STRIDES = (2, 4, 7, 13, 16, 26, 32, 64), (3, 3, 3, 5), (1, 1, 2)
Case = dict[str, Any]


def convolutions(rng: random.Random, until: float) -> list[Case]:
    """Measure convolutions of random shapes until the time is up."""
    rows = []
    while monotonic() < until:
        clients, batch, channels, size, terms, kernel, stride = (
            rng.choice(choice) for choice in (CLIENTS, BATCHES, CHANNELS, SIZES, TERMS, KERNELS, STRIDES)
        )
        if clients * batch * channels * size**2 * terms * kernel**2 / stride**2 < LARGEST:
            shapes = (batch, channels, size, size), (terms, channels, kernel, kernel)
            rows.append(convolution(clients, *shapes, stride))
    return rows


def convolution(clients: int, batch: tuple[int, ...], filters: tuple[int, ...], stride: int) -> Case:
    x = torch.randn(clients * batch[0], *batch[1:]).contiguous(memory_format=torch.channels_last).requires_grad_()
    its, padding = torch.randn(clients, *filters, requires_grad=True), filters[-1] // 2
    geometry = Geometry((stride, stride), (padding, padding), (1, 1))
    size = WAYS["looped"](x, its, geometry).shape[2:]

    def there_and_back(way: Callable[..., torch.Tensor]) -> object:
        return torch.autograd.grad(way(x, its, geometry).square().sum(), (x, its))

    seconds = measure({name: partial(there_and_back, way) for name, way in WAYS.items()})
    return {
        "clients": clients,
        "batch": batch,
        "filters": filters,
        "size": list(size),
        "rule": convolution_way(batch, filters, size, "cpu"),
        "seconds": seconds,
    }


def models() -> list[tuple[str, dict[str, Any], tuple[int, ...], int]]:
    """Return (model, options, input shape, batch size)."""
    resnet = [
        ("resnet18_gn", {"width": width, "groups": 4, "blocks": [1, 1, 1], "stem_stride": stride}, shape, batch)
        for width in (8, 16, 32)
        for shape, stride in (((1, 8, 8), 1), ((1, 28, 28), 1), ((3, 32, 32), 2), ((3, 32, 32), 1))
        for batch in (8, 16)
    ]
    cct = [
        ("cct_6_3x2", {"dim": dim, "depth": 2, "heads": 2}, (3, 32, 32), batch)
        for dim in (32, 64, 128)
        for batch in (10, 32)
    ]
    gpt = [
        ("gpt_tiny", {"width": width, "depth": 2, "heads": 2}, (length,), batch)
        for width in (32, 64, 128)
        for length in (16, 80)
        for batch in (8, 32)
    ]
    small = [("cnn", {}, shape, batch) for shape in ((1, 8, 8), (1, 28, 28), (3, 32, 32)) for batch in (8, 32)]
    mlp = [("mlp", {"hidden": hidden}, (1, 28, 28), batch) for hidden in ([64], [256], [256, 256]) for batch in (8, 32)]
    return [*resnet, *cct, *gpt, *small, *mlp]


def trainings(rng: random.Random, until: float) -> list[Case]:
    """Measure models in random order until the time is up."""
    rows = []
    for name, options, shape, batch in rng.sample(models(), len(models())):
        for ratio in (0.1, 0.4, None):
            if monotonic() < until:
                case = {"model": name, "options": options, "shape": shape, "batch": batch, "ratio": ratio}
                rows.append(case | training(make_job(name, options, shape, batch), ratio))
    return rows


def training(job: Job, ratio: float | None) -> Case:
    shard = ShardPlanner("dense" if ratio is None else "unbiased").plan(job.model, {0: ratio or 1.0})[0]
    trial = Trial(SequentialEngine(job).resident(shard), job)
    operations, layers = trial.operations()
    rule = "together" if pays_together(operations, layers, "cpu") else "alone"
    seconds = measure({"alone": trial.alone, "together": trial.together()})
    return {"operations": operations, "layers": layers, "rule": rule, "seconds": seconds}


def make_job(name: str, options: dict[str, Any], shape: tuple[int, ...], batch: int) -> Job:
    text, classes = len(shape) == 1, 80
    inputs = torch.randint(classes if text else 256, (5 * batch, *shape), dtype=torch.int64 if text else torch.uint8)
    targets = torch.randint(classes, (5 * batch, *shape) if text else (5 * batch,))
    parts = (unchanged, None, 0) if text else (standardize, flip, -100)
    split = Split(inputs, targets)
    dataset = Dataset("random", split, split, classes, shape, *parts)
    model = build_model(name, input_shape=shape, num_classes=classes, **options)
    return Job(model, {0: ClientData(inputs, targets)}, dataset, LocalConfig(batch_size=batch), 10.0, 0)


def tell(title: str, rows: list[Case], margin: float = 0.0) -> None:
    """Print how much slower the rule's ways are than the fastest; a way taken for its other merits costs no margin."""
    losses = [row["seconds"][row["rule"]] * (1 - margin * (row["rule"] == "alone")) for row in rows]
    losses = [loss / min(row["seconds"].values()) for loss, row in zip(losses, rows, strict=True)]
    average = exp(mean(log(max(1.0, loss)) for loss in losses))
    total = sum(row["seconds"][row["rule"]] for row in rows) / sum(min(row["seconds"].values()) for row in rows)
    right = mean(loss <= 1.1 for loss in losses)
    print(
        f"{title}: {len(rows)} cases; the rule's way takes {average:.3f} times the fastest's time on average, "
        f"{total:.3f} times in all, {max(losses):.2f} times at worst, at most 1.1 times in {100 * right:.0f} % of them"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, half = random.Random(0), args.seconds / 2
    results = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "convolutions": convolutions(rng, monotonic() + half),
        "trainings": trainings(rng, monotonic() + half),
    }
    tell("convolutions", results["convolutions"])
    tell("training", results["trainings"], GAIN)
    rows = (json.dumps(key) + ": " + _lines(value) for key, value in results.items())
    args.output.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def _lines(value: object) -> str:
    """Write a list a line an entry."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"


if __name__ == "__main__":
    main()
