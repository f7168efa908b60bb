"""Measure what only a GPU can show, most useful first, as far as the minutes go.

The parts: `lanes` against `sequential` after one round, seconds and kernels of the three published settings, memory by
the number of lanes, the server's work, and factorized layers against dense ones. The file is written after each part.
Where a dataset is not there, random samples of its shapes take its place, which the file says.

    python benchmarks/gpu.py --minutes 8
    python benchmarks/gpu.py --only 'rounds/*/float32'          # the parts whose names match
    python benchmarks/gpu.py --device cpu --output tiny.json    # the same in tiny form, to try the script
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any
from unittest.mock import patch

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues of the device, one for each lane

import numpy as np
import torch
from client_memory import random_split
from measure import save, seconds
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library

from models import MODELS
from sharding import UserError, clip_and_decay
from sharding.layers import factorized_type
from sharding.layers.decomposition import form_of
from sharding.rounds.client import train_model
from sharding.rounds.failures import one_line
from sharding.terms.strategies import num_terms
from train.callbacks import Callback, Plans
from train.config.schema import Config, load_config
from train.data import Dataset, default_root, empty_dataset
from train.engines import LanesEngine
from train.engines.engine import Engine
from train.engines.local_training import loss_of, make_optimizer, raw_batches
from train.engines.sequential import SequentialEngine
from train.experiment.assembly import (
    assign_keep_ratios,
    build_experiment,
    find_engine,
    partition_dataset,
    read_dataset,
)
from train.experiment.clients import Clients
from train.experiment.evaluation import scores
from train.experiment.experiment import Experiment
from train.experiment.metrics import RoundMetrics
from train.rounds import collect, run_rounds
from train.rundir.provenance import find_commit

ROOT = Path(__file__).parents[1]
SETTINGS = {name: f"configs/{name}.yaml" for name in ("cifar10_resnet18", "cifar100_cct", "shakespeare_gpt")}
VARIANTS: dict[str, list[str]] = {
    "float32": [],
    "bfloat16": ["local.precision=bfloat16"],
    "compiled": ["local.compile=true"],
}
TINY = {
    "cifar10_resnet18": ["model={name: resnet18_gn, width: 4, groups: 2, blocks: [1, 1]}"],
    "cifar100_cct": ["model={name: cct_6_3x2, dim: 16, depth: 2, heads: 2}", "data.partition=iid"],
    "shakespeare_gpt": ["model={name: gpt_tiny, width: 16, depth: 2, heads: 2}"],
    "all": ["clients.count=4", "clients.per_round=2", "local.batch_size=4", "local.epochs=1"],
}
FROZEN = ["strategy=top_n", "init=low_rank", "result=last"]
DIFFERENCES = {  # setting and words
    "resnet": ("cifar10_resnet18", []),
    "cct": ("cifar100_cct", []),
    "gpt": ("shakespeare_gpt", []),
    "batch norm": ("cifar10_resnet18", ["model={name: batch_norm}"]),
    "residual": ("cifar10_resnet18", [*FROZEN, "residual=int4"]),
    "tail": ("cifar10_resnet18", [*FROZEN, "keep_ratio={0.1: 0.5, 0.2: 0.5}", "tail=int4"]),
}
LANES = (1, 2, 5, 10)
STEPS = 3  # that are profiled
ROUNDS = 3  # that are timed; the first captures the steps
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 4096x4096, batch 64": (lambda: nn.Linear(4096, 4096), (64, 4096)),
    "linear 768x3072, 1576 tokens": (lambda: nn.Linear(768, 3072), (8, 197, 768)),
    "conv 512x512 3x3, 4x4, batch 32": (lambda: nn.Conv2d(512, 512, 3, padding=1), (32, 512, 4, 4)),
    "conv 64x64 3x3, 32x32, batch 32": (lambda: nn.Conv2d(64, 64, 3, padding=1), (32, 64, 32, 32)),
}
TINY_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 32x32, batch 4": (lambda: nn.Linear(32, 32), (4, 32)),
}

Part = Callable[[], Mapping[str, object]]


class Bench:
    """What the parts share: the device (`cpu` for the tiny form), the datasets, and why some have random samples."""

    def __init__(self, device: str, data: Path) -> None:
        self.device, self.data, self.tiny = device, data, device == "cpu"
        self.synthetic: dict[str, str] = {}
        self._datasets: dict[str, Dataset] = {}

    def experiment(self, setting: str, *words: str) -> Experiment:
        """Build a published setting with further words, on its own data or on random samples."""
        words = (*(TINY[setting] + TINY["all"] if self.tiny else []), *words)
        where = (f"device={self.device}", f"data.root={self.data}", "engine=lanes")
        config = load_config(ROOT / SETTINGS[setting], [*words, *where, "rounds=1000", "evaluate_every=1000"])
        dataset = self._dataset(config).to(self.device)
        shares = partition_dataset(config, dataset)
        sizes = {client: len(part) for client, part in shares.items()}
        ratios = assign_keep_ratios(config.keep_ratio, len(shares), config.seed_of_data)
        clients = Clients(shares, sizes, ratios)
        return build_experiment(config, dataset.without_training(), clients, find_engine(config))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _dataset(self, config: Config) -> Dataset:
        name = config.data.name
        if name not in self._datasets:
            try:
                if self.tiny:
                    raise UserError("the tiny form has random samples")
                self._datasets[name] = read_dataset(config)
            except UserError as error:
                self.synthetic[name] = one_line(error)
                self._datasets[name] = random_samples(name, config.clients.count, self.tiny)
        return self._datasets[name]


def random_samples(name: str, num_clients: int, tiny: bool) -> Dataset:
    """Return a dataset of random samples: about as many as the published one has, or a few."""
    dataset = empty_dataset(name)
    if name == "shakespeare":
        each, num_test = (8, 8) if tiny else (50, 2000)
        total = each * num_clients
        dataset = replace(dataset, natural=np.array_split(np.arange(total), num_clients))
    else:
        total, num_test = (40, 8) if tiny else (50_000, 10_000)
        coarse = np.arange(100) // 5 if name == "cifar100" else None  # pachinko allocation needs superclasses
        dataset = replace(dataset, coarse=coarse)
    return replace(dataset, train=random_split(dataset, total), test=random_split(dataset, num_test))


def batch_norm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a small convolutional network with batch norms."""
    channels = (input_shape[0], 32, 64, 64)
    blocks = [
        nn.Sequential(nn.Conv2d(inside, out, 3, 2, 1), nn.BatchNorm2d(out), nn.ReLU())
        for inside, out in pairwise(channels)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes))


def difference(bench: Bench, setting: str, words: list[str]) -> dict[str, object]:
    """Train four clients with `sequential`, twice, and with `lanes`, all without TF32, and compare their updates."""
    with patch.dict(MODELS, batch_norm=batch_norm), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        experiment = bench.experiment(setting, *words)
        plan = experiment.plan(experiment.sampler.cohort(0)[:4], 0)

        def updates(engine: Engine) -> list[dict[str, torch.Tensor]]:
            replies = [reply for _, reply in engine.train(plan, 0, experiment.lr(0))]
            engine.close()
            if failures := [str(reply.failure) for reply in replies if reply.failure is not None]:
                raise RuntimeError(failures[0])
            return [reply.update.trained() for reply in replies if reply.update is not None]

        expected = updates(SequentialEngine(experiment.job))
        return {
            "lanes": largest_difference(expected, updates(LanesEngine(experiment.job))),
            "sequential_again": largest_difference(expected, updates(SequentialEngine(experiment.job))),
            "clients": len(expected),
        }


def largest_difference(expected: list[dict[str, torch.Tensor]], found: list[dict[str, torch.Tensor]]) -> float:
    """Return the largest ‖a - b‖/‖b‖ of any tensor of any client."""
    shares = [
        (mine[name].float() - tensor.float()).norm() / tensor.float().norm().clamp_min(1e-12)
        for theirs, mine in zip(expected, found, strict=True)
        for name, tensor in theirs.items()
    ]
    return float(torch.stack(shares).max())


class Keep(Callback):
    """Keeps the metrics of some rounds, and then ends the run."""

    def __init__(self, count: int) -> None:
        self.metrics: list[RoundMetrics] = []
        self._count = count

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool:
        """End the run after the last."""
        self.metrics.append(metrics)
        return len(self.metrics) == self._count


def rounds(bench: Bench, setting: str, words: list[str], engine: str = "lanes", count: int = ROUNDS) -> dict[str, Any]:
    """Return the seconds of rounds and of their phases; the first is apart, since steps are captured in it."""
    experiment = bench.experiment(setting, *words)
    experiment = replace(experiment, make_engine={"lanes": LanesEngine, "sequential": SequentialEngine}[engine])
    experiment.start()
    kept = Keep(count)
    run_rounds(experiment, 0, [kept])
    experiment.close()
    first, *others = kept.metrics
    phases = ("seconds", "seconds_plan", "seconds_train", "seconds_aggregate")
    timed = {phase: median(getattr(metrics, phase) for metrics in others or [first]) for phase in phases}
    return timed | {"first": first.seconds, "failed_clients": sum(metrics.num_failed for metrics in kept.metrics)}


def kernels_by_time(part: Part) -> Mapping[str, object]:
    """Measure a part where cuDNN tries its kernels and takes the fastest; runs do not, since it decides rounding."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32):
        return part()


def kernels(bench: Bench, setting: str, words: list[str]) -> dict[str, object]:
    """Return the kernels and copies of one eager step of one client, and their milliseconds on the GPU."""
    experiment = bench.experiment(setting, *words)
    job = experiment.job
    client = max(job.clients, key=lambda one: len(job.clients[one]))  # whose first batch is full
    shard = experiment.plan([client], 0).shard(client)
    model, local = SequentialEngine(job).resident(shard), job.local
    optimizer = make_optimizer(model, local, 0.0)  # the model stays as it is
    optimizer.register_step_pre_hook(clip_and_decay(model, shard.clip, local.decay, local.decay_of))
    batch = next(raw_batches(job.clients[client], job.dataset, local, (0, 0, client)))

    def steps() -> None:
        train_model(model, [batch] * STEPS, optimizer, loss_of(job.dataset, local))
        bench.synchronize()

    steps()
    if bench.device != "cuda":
        return {"skipped": "a CPU starts no kernels"}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        steps()
    events = [event for event in profiled.key_averages() if event.self_device_time_total]
    largest = sorted(events, key=lambda event: -event.self_device_time_total)[:12]
    return {
        "kernels": sum(event.count for event in events) / STEPS,
        "milliseconds": sum(event.self_device_time_total for event in events) / STEPS / 1e3,
        "largest": {event.key[:100]: event.self_device_time_total / STEPS / 1e3 for event in largest},
    }


def memory(bench: Bench, setting: str) -> dict[str, object]:
    """Return the peak of memory in MB and the seconds of training of a cohort, by the number of lanes."""
    experiment = bench.experiment(setting)
    found = {}
    for count in LANES[:2] if bench.tiny else LANES:
        plan = experiment.plan(experiment.sampler.cohort(0), 0)
        engine = LanesEngine(experiment.job, count)
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = monotonic()
        for t in (0, 1):
            start = monotonic()
            list(engine.train(plan, t, experiment.lr(t)))
            bench.synchronize()
        took = monotonic() - start
        peak = {
            "allocated_mb": torch.cuda.max_memory_allocated() / 2**20 if bench.device == "cuda" else None,
            "reserved_mb": torch.cuda.max_memory_reserved() / 2**20 if bench.device == "cuda" else None,
        }
        engine.close()
        found[str(count)] = {"seconds": took} | peak
    return found


def server(bench: Bench, setting: str) -> dict[str, object]:
    """Return the seconds of the server's work: a plan, the average of a cohort's updates with a step, an evaluation."""
    experiment = bench.experiment(setting)
    cohort = experiment.sampler.cohort(0)
    plan = experiment.plan(cohort, 0)
    selection = experiment.sampler.select(0, cohort, {})
    replies = list(SequentialEngine(experiment.job).train(plan, 0, 0.0))

    def aggregate() -> None:
        experiment.server.step(collect(experiment, plan, selection, replies)[0])

    return {
        "plan": seconds(lambda: experiment.plan(cohort, 0), 3),
        "aggregate": seconds(aggregate, 3),
        "evaluate": seconds(lambda: scores(experiment), 3),
    }


def layers(bench: Bench) -> dict[str, object]:
    """Return the milliseconds of forward and backward of dense layers, and of factorized ones by keep ratio."""
    found = {}
    for name, (make, shape) in (TINY_LAYERS if bench.tiny else LAYERS).items():
        dense, x = make().to(bench.device), torch.randn(shape, device=bench.device)
        kind, rank = factorized_type(dense), form_of(dense).rank
        assert kind is not None
        each = {"dense": dense} | {f"{r}": kind.from_dense(dense, num_terms(rank, r)) for r in (0.1, 0.2)}
        found[name] = {key: 1e3 * time_layer(layer, x) for key, layer in each.items()}
    return found


def time_layer(layer: nn.Module, x: torch.Tensor, repeats: int = 20) -> float:
    """Return the seconds of a forward and backward pass, of several that are started together."""
    inputs = [x.clone().requires_grad_(), *layer.parameters()]
    gradient = torch.randn_like(layer(x))

    def passes() -> None:
        for _ in range(repeats):
            torch.autograd.grad(layer(inputs[0]), inputs, gradient)

    return seconds(passes, 3) / repeats


def parts_of(bench: Bench) -> dict[str, Part]:
    """Return the parts by name, most useful first."""
    parts: dict[str, Part] = {f"difference/{k}": partial(difference, bench, *v) for k, v in DIFFERENCES.items()}
    for precision in ("float32", "bfloat16"):
        for setting in SETTINGS:
            parts[f"rounds/{setting}/{precision}"] = partial(rounds, bench, setting, VARIANTS[precision])
            parts[f"kernels/{setting}/{precision}"] = partial(kernels, bench, setting, VARIANTS[precision])
    for variant, words in VARIANTS.items():
        if not (bench.tiny and variant == "compiled"):  # a compiler takes minutes on a CPU
            dense = partial(rounds, bench, "cifar10_resnet18", ["strategy=dense", *words])
            parts[f"rounds/dense/{variant}"] = dense
            parts[f"rounds/dense/{variant}, kernels by time"] = partial(kernels_by_time, dense)
    parts["memory/cifar10_resnet18"] = partial(memory, bench, "cifar10_resnet18")
    parts |= {f"server/{setting}": partial(server, bench, setting) for setting in SETTINGS}
    parts["layers"] = partial(layers, bench)
    for setting in () if bench.tiny else SETTINGS:  # a compiler takes minutes on a CPU
        parts[f"rounds/{setting}/compiled"] = partial(rounds, bench, setting, VARIANTS["compiled"])
        parts[f"kernels/{setting}/compiled"] = partial(kernels, bench, setting, VARIANTS["compiled"])
    for setting in SETTINGS:
        parts[f"sequential/{setting}"] = partial(rounds, bench, setting, [], "sequential", 1)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="after which no further part starts (default: 8)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="parts to run, by a part of their names")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--data", type=Path, default=default_root(), help="the folder of the datasets")
    parser.add_argument("--output", type=Path, help="file to write (default: results/gpu/<card>-<date>.json)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs the same in tiny form")
    start, bench = monotonic(), Bench(args.device, args.data)
    card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    now = datetime.now(UTC)
    named = f"{re.sub('[^a-z0-9]+', '-', card.lower()).strip('-')}-{now:%Y-%m-%d}.json"
    done: dict[str, object] = {}
    results: dict[str, object] = {
        "card": card,
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "commit": find_commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "tiny": bench.tiny,
        "random_samples": bench.synthetic,
        "parts": done,
    }
    parts = parts_of(bench)
    chosen = [name for name in parts if fnmatch(name, f"*{args.only}*")]  # as in `train table --only`
    if not chosen:
        parser.error(f"--only {args.only!r} matches no part; parts: {', '.join(parts)}")
    for name in chosen:
        begun = monotonic()
        if begun - start > 60 * args.minutes:
            done[name] = {"skipped": f"the {args.minutes:g} minutes were over"}
        else:
            try:
                done[name] = {**parts[name](), "part_seconds": round(monotonic() - begun, 1)}
            except Exception as error:  # the other parts are worth having
                done[name] = {"failed": one_line(f"{type(error).__name__}: {error}")}
        print(name, json.dumps(done[name]), flush=True)
        save(args.output or ROOT / "results" / "gpu" / named, results)


if __name__ == "__main__":
    main()
