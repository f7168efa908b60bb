"""Fixed-size sampling with given inclusion probabilities. One design per file; `registry.py` names them."""

from sharding.designs.base import Design
from sharding.designs.conditional_poisson import entropy
from sharding.designs.registry import DESIGNS, fit, fit_all, joint_inclusion, sample
from sharding.designs.successive import SuccessiveDesign

__all__ = [
    "DESIGNS",
    "Design",
    "SuccessiveDesign",
    "entropy",
    "fit",
    "fit_all",
    "joint_inclusion",
    "sample",
]
