"""The names that a configuration may use, as printed by `python -m train list`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models import MODELS
from sharding import COMPRESSIONS, DESIGNS, SAMPLERS, STRATEGIES
from train.config.registries import LOSSES, OPTIMIZERS, SCHEDULES, SERVER_OPTIMIZERS, TRACKERS
from train.data import DATASETS
from train.data.partition import PARTITIONS
from train.engines import ENGINES
from train.report.tables.layout import TABLES

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "design": DESIGNS,
    "compression": COMPRESSIONS,
    "model": MODELS,
    "data": DATASETS,
    "data.partition": PARTITIONS,
    "clients.sampler": SAMPLERS,
    "local.optimizer": OPTIMIZERS,
    "local.schedule": SCHEDULES,
    "local.loss": LOSSES,
    "server_optimizer": SERVER_OPTIMIZERS,
    "tracker": TRACKERS,
    "engine": ENGINES,
}


def names() -> Iterator[str]:
    """Yield each strategy, a line for each other key that takes a name, and the tables and configs."""
    yield from (f"strategy={name}: {strategy.summary}" for name, strategy in STRATEGIES.items())
    for key, registry in REGISTRIES.items():
        yield f"{key}: {', '.join(registry)}"
    yield f"table: {', '.join(TABLES)}"
    configs = sorted(path.as_posix() for path in Path("configs").glob("*.yaml"))
    yield f"configs: {', '.join(configs) or 'none in ./configs'}"
