"""The designs by name, and the functions that take one."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.errors import UserError, lookup, safe_repr
from sharding.terms.designs import r
from sharding.terms.designs.brewer import Brewer
from sharding.terms.designs.conditional_poisson import fit_cps
from sharding.terms.designs.design import Design, Fit
from sharding.terms.designs.minimum_support import fit_minimum_support
from sharding.validation import as_whole, typed

DESIGNS: dict[str, Fit] = {
    "cps": fit_cps,
    "brewer": Brewer,
    "minimum_support": fit_minimum_support,
    "r_cps": r.fit_r("UPmaxentropy"),
    "r_brewer": r.fit_r("UPbrewer"),
    "r_minimum_support": r.fit_r("UPminimalsupport"),
}


def fit(inclusion: ArrayLike, design: str = "cps") -> Design:
    """Prepare a design for drawing samples that honor `inclusion`.

    Args:
        inclusion: (N,) π in [0, 1] whose sum n is a whole number, to 1e-6.
        design: a name in `DESIGNS`.

    Raises:
        UserError: π is invalid, the design is unknown, or R or rpy2 is missing for one of R's designs.
    """
    return Design.fit(inclusion, lookup(DESIGNS, design, "design"))


@typed
def draw_terms(
    inclusion: ArrayLike,
    design: str = "cps",
    rng: np.random.Generator | None = None,
    size: int | None = None,
) -> NDArray[np.int64]:
    """Draw exactly n = Σπ distinct terms, term i with chance π_i.

    Args:
        inclusion: (N,) π in [0, 1] whose sum is a whole number, to 1e-6.
        design: a name in `DESIGNS`.
        rng: source of randomness; required, so that draws can be repeated.
        size: number of independent samples; None for one.

    Returns:
        ascending indices, (n,) or (size, n).

    Raises:
        UserError: as `fit`, `rng` is not a generator, or a size below 1.
    """
    if not isinstance(rng, np.random.Generator):
        raise UserError(f"draw_terms needs a generator, not {safe_repr(rng)}: rng=numpy.random.default_rng(seed)")
    return fit(inclusion, design).draw(rng, None if size is None else as_whole(size, "size"))
