"""Engines train a round's cohort. All give the same result for the same seed; they differ in speed."""

from train.engines.base import Engine, Update
from train.engines.sequential import SequentialEngine

ENGINES: dict[str, type[SequentialEngine]] = {"sequential": SequentialEngine}

__all__ = ["ENGINES", "Engine", "SequentialEngine", "Update"]
