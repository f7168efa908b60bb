"""The names that a configuration may use, as printed by `python -m train list`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sharding import COMPRESSIONS
from train import registries
from train.engines import ENGINES
from train.report.tables.layout import TABLES

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "design": registries.DESIGNS,
    "compression": COMPRESSIONS,
    "model": registries.MODELS,
    "data": registries.DATASETS,
    "data.partition": registries.PARTITIONS,
    "clients.sampler": registries.SAMPLERS,
    "local.optimizer": registries.OPTIMIZERS,
    "local.schedule": registries.SCHEDULES,
    "local.loss": registries.LOSSES,
    "server_optimizer": registries.SERVER_OPTIMIZERS,
    "tracker": registries.TRACKERS,
    "engine": ENGINES,
}


def names() -> Iterator[str]:
    """Yield each strategy, a line for each other key that takes a name, and the tables and configs."""
    yield from (f"strategy={name}: {strategy.summary}" for name, strategy in registries.STRATEGIES.items())
    for key, registry in REGISTRIES.items():
        yield f"{key}: {', '.join(registry)}"
    yield f"table: {', '.join(TABLES)}"
    configs = sorted(path.as_posix() for path in Path("configs").glob("*.yaml"))
    yield f"configs: {', '.join(configs) or 'none in ./configs'}"
