"""Fixed-size sampling with given inclusion probabilities. One design per file; `registry.py` names them."""

from sharding.designs.base import Design
from sharding.designs.registry import DESIGNS, draw_terms, fit, fit_all
from sharding.designs.successive import SuccessiveDesign

__all__ = [
    "DESIGNS",
    "Design",
    "SuccessiveDesign",
    "draw_terms",
    "fit",
    "fit_all",
]
