"""R's designs through rpy2, for the original code path and as an oracle in the tests.

Needs R with the packages `sampling` (Tillé & Matei) and `BiasedUrn` (Fog), and rpy2; nothing is imported
before it is used.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import RLock
from typing import Any

import numpy as np

from sharding.terms.designs.design import Fit, Floats, Indices

INSTALL = (
    "install R with its packages sampling and BiasedUrn (Debian: r-base-core r-cran-sampling "
    "r-cran-biasedurn) and rpy2 (pip install rpy2)"
)


@dataclass(frozen=True)
class RDesign:
    """A function of R's package `sampling` that turns π into the zeros and ones of a sample."""

    function: str
    chances: Floats
    count: int

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return (size, count) positions; R's random state is seeded from `rng`."""
        if self.count == 1:  # one distribution for all designs; UPmaxentropy raises here
            return rng.choice(self.chances.size, size=(size, 1), p=self.chances / self.chances.sum())
        with alone():
            require("base").set_seed(int(rng.integers(2**31 - 1)))
            taken = [call("sampling", self.function, self.chances) > 0.5 for _ in range(size)]
        return np.nonzero(np.array(taken))[1].reshape(size, self.count)


def fit_r(function: str) -> Fit:
    """Return the fit of the design that `function` of R's package `sampling` draws from.

    The fit raises ImportError when R, the package or rpy2 is absent.
    """

    def fit(chances: Floats, count: int) -> RDesign:
        with alone():
            require("sampling")
        return RDesign(function, chances, count)

    return fit


def call(package: str, function: str, *arguments: Any) -> Floats:
    """Call an R function on numbers and vectors and return its result as a flat float64 array."""
    with alone():
        library = require(package)
        vectors = import_module("rpy2.robjects.vectors")
        converted = [vectors.FloatVector(a) if isinstance(a, np.ndarray) else a for a in arguments]
        return np.array(getattr(library, function)(*converted), dtype=np.float64).ravel()


_LOCK = RLock()  # reentrant: `draw` holds it and calls `call`


@contextmanager
def alone() -> Iterator[None]:
    """Use R from one thread at a time: it has one random state, and rpy2's conversions belong to a thread."""
    with _LOCK:
        require("base")
        robjects = import_module("rpy2.robjects")
        with robjects.conversion.localconverter(robjects.default_converter), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield


@contextmanager
def _library_path_kept() -> Iterator[None]:
    """Undo what rpy2 does to LD_LIBRARY_PATH on import: child processes would load the system's libraries by it,
    another build of Python itself among them.
    """
    before = os.environ.get("LD_LIBRARY_PATH")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("LD_LIBRARY_PATH", None)
        else:
            os.environ["LD_LIBRARY_PATH"] = before


@cache
def require(name: str) -> Any:
    """Load an R package, without R's chatter on the console; raise an ImportError without R, the package or rpy2."""
    with warnings.catch_warnings(), _library_path_kept():
        warnings.simplefilter("ignore")
        try:
            logging.getLogger("rpy2.rinterface_lib.callbacks").setLevel(logging.ERROR)
            return import_module("rpy2.robjects.packages").importr(name)
        except Exception as error:  # no rpy2, no R, or no such package: each has its own type, some private
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ImportError(f"R's package {name!r} cannot be used ({problem}); {INSTALL}") from None
