"""Engines train a round's cohort. On a CPU all give the same bits for the same seed; they differ in speed."""

import logging
from collections.abc import Callable
from multiprocessing import parent_process

from sharding.errors import UserError
from train.engines.engine import Engine, Job, Replies, Reply
from train.engines.lanes import LanesEngine
from train.engines.processes import ProcessesEngine, count_devices
from train.engines.ray import RayEngine
from train.engines.sequential import SequentialEngine

log = logging.getLogger(__name__)


def auto_engine(job: Job) -> Engine:
    """Return `lanes` with one GPU, `processes` with several GPUs or cores, `sequential` if processes cannot start."""
    if job.device.type == "cuda" and count_devices(job) == 1:
        return LanesEngine(job)
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
    "lanes": LanesEngine,
    "processes": ProcessesEngine,
    "ray": RayEngine,
}

__all__ = ["ENGINES", "Engine", "Job", "LanesEngine", "ProcessesEngine", "RayEngine", "Replies", "Reply"]
