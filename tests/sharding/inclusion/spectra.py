"""Spectra shared by the tests of inclusion and designs."""

import numpy as np
from hypothesis import strategies as st

SPECTRA = {
    "power": lambda n: np.arange(1, n + 1) ** -0.5,
    "geometric": lambda n: 10.0 ** (-12 * np.arange(n) / n),
    "flat": np.ones,
    "ties": lambda n: np.repeat([4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.06, 0.01], n)[::8][:n],
    "two levels": lambda n: np.where(np.arange(n) < n // 2, 1.0, 1e-9),
}


def magnitudes(smallest=1e-8, largest_size=9):
    """Positive magnitudes over many orders, ties among them."""
    value = st.one_of(st.floats(smallest, 1.0), st.sampled_from([1.0, 0.5, 1e-4]))
    return st.lists(value, min_size=2, max_size=largest_size).map(np.array)
