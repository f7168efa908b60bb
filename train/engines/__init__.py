"""Engines train a round's cohort. All give the same bits for the same seed; they differ in speed."""

import logging
from collections.abc import Callable
from multiprocessing import parent_process

from sharding.errors import UserError
from train.engines.engine import Engine, Job, Replies, Reply
from train.engines.processes import ProcessesEngine, count_devices
from train.engines.ray import RayEngine
from train.engines.sequential import SequentialEngine

log = logging.getLogger(__name__)


def auto_engine(job: Job) -> Engine:
    """Return an engine with one process per core or GPU; `sequential` with only one, or if processes cannot start."""
    if parent_process() is not None or count_devices(job) < 2:  # `compare` has its own processes
        return SequentialEngine(job)
    try:
        return ProcessesEngine(job)
    except UserError as error:
        log.warning("Training in one process: %s", error)
        return SequentialEngine(job)


ENGINES: dict[str, Callable[[Job], Engine]] = {
    "auto": auto_engine,
    "sequential": SequentialEngine,
    "processes": ProcessesEngine,
    "ray": RayEngine,
}

__all__ = ["ENGINES", "Engine", "Job", "ProcessesEngine", "RayEngine", "Replies", "Reply"]
