"""Inspect a configuration's clients and model without training."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharding.errors import join_first
from sharding.factorization.shardable import sort_layers
from sharding.modules.checkpointing import has_blocks
from sharding.rounds.plan import Client
from train.cli.client_memory import client_memory
from train.config.schema import Config
from train.config.sections import LocalConfig
from train.data import Dataset
from train.data.partition import class_counts
from train.experiment.assembly import (
    assign_keep_ratios,
    dense_nbytes,
    first_model,
    make_model,
    make_planner,
    partition_indices,
    read_dataset,
)
from train.report.figures import partition_drawings
from train.report.plots import save

NAMED = 20  # number of clients of a keep ratio that are listed


def inspect_partition(config: Config, into: Path, memory: float | None = None) -> Iterator[str]:
    """Draw a partition as PNG and SVG into a folder, and yield lines that describe clients and model.

    With the `memory` of a client, in bytes, they name the largest keep ratio that fits. Raise a UserError if the data
    is not there, or cannot be partitioned as configured.
    """
    for one in config.models():
        yield from _inspect(one, config.name if one is config else f"{config.name}-{one.name}", into, memory)


def _inspect(config: Config, name: str, into: Path, memory: float | None) -> Iterator[str]:
    dataset = read_dataset(config)
    parts = partition_indices(config, dataset)
    keep_ratios = assign_keep_ratios(config.keep_ratio, len(parts), config.seed_of_data)
    sizes, targets = np.array([len(part) for part in parts]), dataset.train.targets
    counts = class_counts(parts, targets.numpy(), dataset.num_classes) if targets.dim() == 1 else None  # text has none
    yield f"{len(parts)} clients share {sizes.sum():,} of {len(dataset.train):,} samples of {dataset.name}"
    yield f"samples a client: {_spread(sizes)}"
    if counts is not None:
        yield f"classes a client: {_spread((counts > 0).sum(axis=1))}"
    yield from _describe_model(config, dataset, keep_ratios)
    if memory is not None:
        yield from _describe_fit(config, dataset, memory)
    clients = {"samples": sizes, "keep_ratios": list(keep_ratios.values()), "classes": counts}
    into.mkdir(parents=True, exist_ok=True)
    drawings = partition_drawings(clients, f"{name} ({config.data.partition.name})")
    for kind, drawing in zip(("partition", "classes"), drawings, strict=False):
        path = into / f"{name}-{kind}.png"
        done = "overwrote" if path.exists() else "wrote"
        yield from (f"{done} {written}" for written in save(drawing.figure, path))


def _describe_model(config: Config, dataset: Dataset, keep_ratios: Mapping[Client, float]) -> Iterator[str]:
    """Describe the model's size and, for each keep ratio, a shard's bytes, a client's memory, and the clients."""
    planner, built = make_planner(config), make_model(config, dataset)
    parameters, dense = sum(parameter.numel() for parameter in built.parameters()), dense_nbytes(built)
    model = first_model(config, built, planner.strategy, keep_ratios.values())
    frozen = planner.frozen(model)
    size = f"{parameters:,} parameters, {dense:,} bytes"
    sharded = planner.sharded_layers(model)
    yield f"{config.model.name}: {size}; {config.strategy} shards {len(sharded)} layers"
    if sharded:
        whole = sort_layers(built, planner.skip).skipped
        names = [f"{name} ({whole[name]})" for name, _ in built.named_modules() if name in whole]
        yield f"layers that are sent whole: {join_first(names, NAMED) or 'none'}"
    if len(frozen):
        yield f"first contact: each client is sent {frozen.nbytes:,} bytes once, which stay frozen"
    strongest = max(keep_ratios.values())
    if model is not built and config.residual is None:
        yield f"rank: init=low_rank, so the trained layers have about the rank of a shard of keep ratio {strongest:g}"
    for ratio in sorted(set(keep_ratios.values())):
        nbytes = planner.nbytes(model, ratio, strongest)
        clients = [client for client in keep_ratios if keep_ratios[client] == ratio]
        share = f"{nbytes:,} bytes a shard, {100 * nbytes / dense:.1f} % of the model's"
        yield f"keep ratio {ratio:g}: {share}; {len(clients)} clients, {join_first(clients, NAMED)}"
        memory = client_memory(planner, model, ratio, strongest, dataset, config.local)
        parts = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in asdict(memory).items())
        yield f"  a client's tensors: {memory.total / 1e6:,.1f} MB ({parts}), batches of {config.local.batch_size}"
        if not config.local.checkpoint and has_blocks(model):
            local = config.local.model_copy(update={"checkpoint": True})
            less = client_memory(planner, model, ratio, strongest, dataset, local).total
            yield f"  with local.checkpoint=true: {less / 1e6:,.1f} MB"


def _describe_fit(config: Config, dataset: Dataset, memory: float) -> Iterator[str]:
    """Name the largest keep ratio whose clients' tensors fit a memory, with whole batches and halves, and by blocks."""
    planner, built = make_planner(config), make_model(config, dataset)

    def fits(percent: int, local: LocalConfig) -> bool:
        ratio = percent / 100
        model = first_model(config, built, planner.strategy, [ratio])
        return client_memory(planner, model, ratio, ratio, dataset, local).total <= memory

    for checkpoint in sorted({config.local.checkpoint, has_blocks(built)}):
        for size in (config.local.batch_size, ceil(config.local.batch_size / 2)):
            local = config.local.model_copy(update={"checkpoint": checkpoint, "batch_size": size})
            largest = bisect_left(range(1, 101), True, key=lambda percent: not fits(percent, local))
            fitting = f"a keep ratio of at most {largest / 100:g}" if largest else "no keep ratio"
            setting = f"local.batch_size={size}" + " local.checkpoint=true" * checkpoint
            yield f"{memory / 1e6:,.1f} MB fit {fitting} with {setting}"


def _spread(values: NDArray[np.int64]) -> str:
    return f"{values.min()} least, {int(np.median(values))} median, {values.max()} most"
