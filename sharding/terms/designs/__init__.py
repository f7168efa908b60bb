"""Fixed-size sampling with given inclusion probabilities. One design per file; `registry.py` names them."""

from sharding.terms.designs.design import Design
from sharding.terms.designs.registry import DESIGNS, draw_terms, fit
from sharding.terms.designs.successive import successive_design

__all__ = [
    "DESIGNS",
    "Design",
    "draw_terms",
    "fit",
    "successive_design",
]
