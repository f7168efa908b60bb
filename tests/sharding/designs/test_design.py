import sys
from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

from sharding import DESIGNS, collective_inclusion, optimal_inclusion
from sharding.terms.designs import fit, r
from sharding.terms.designs.design import split
from tests.sharding.inclusion.spectra import SPECTRA

OURS = [name for name in DESIGNS if not name.startswith("r_")]

NASTY = {
    "all in": np.ones(5),
    "zeros and ones": np.array([1.0, 0.0, 1.0, 0.0]),
    "one free slot": np.array([1.0, 0.3, 0.7, 0.0]),
    "one of many": np.full(50, 1 / 50),
    "all but one": np.full(50, 49 / 50),
    "near the edges": np.array([1 - 1e-12, 1e-12, 0.5, 0.5, 1e-12, 1 - 1e-12]),
    "nearly certain": np.array([1 - 2e-12, 1 - 2e-12, 2e-12, 2e-12]),
    "off by rounding": np.array([0.3, 0.7, 1.0]) - 3e-7,
    "a speck": np.array([1.0, 1.0, 1e-9]),
    "ties": np.repeat([0.9, 0.5, 0.1], [5, 5, 5]) * (8 / 7.5) * np.repeat([1, 1.0, 1.0], 5),
    "single": np.array([1.0]),
    "geometric": optimal_inclusion(SPECTRA["geometric"](200), 20),
    "geometric, n = N − 1": optimal_inclusion(SPECTRA["geometric"](40), 39),
    "collective": collective_inclusion(SPECTRA["power"](100), 10, 10)[0],
}


@pytest.mark.parametrize("design", OURS)
@pytest.mark.parametrize("case", NASTY)
def test_draw_of_any_design_has_the_size_and_respects_certain_terms(case, design):
    pi = NASTY[case]
    fitted = fit(pi, design)
    rng = np.random.default_rng(0)
    n = round(pi.sum())
    samples = fitted.draw(rng, 50)
    assert samples.shape == (50, n)
    assert samples.dtype == np.int64
    assert np.all(np.diff(samples, axis=1) > 0), "ascending and distinct"
    assert samples.min() >= 0
    assert samples.max() < pi.size
    counts = np.bincount(samples.ravel(), minlength=pi.size)
    assert np.all(counts[pi == 1.0] == 50)
    assert np.all(counts[pi == 0.0] == 0)
    assert fitted.draw(rng).shape == (n,)


@pytest.mark.parametrize("design", OURS)
def test_draw_with_the_same_generator_seed_is_equal(design):
    pi = optimal_inclusion(SPECTRA["power"](30), 6)
    one, two = fit(pi, design), fit(pi, design)
    first = one.draw(np.random.default_rng(7), 20)
    np.testing.assert_array_equal(first, two.draw(np.random.default_rng(7), 20))
    assert not np.array_equal(first, two.draw(np.random.default_rng(8), 20))


@pytest.mark.parametrize("error", [-9e-7, 0.0, 9e-7])
def test_split_of_a_sum_off_by_rounding_corrects_it(error):
    certain, free, chances = split(np.array([1.0, 0.25, 0.0, 0.75 + error]))
    assert chances.sum() == pytest.approx(1.0, abs=1e-15)
    np.testing.assert_array_equal(certain, [0])
    np.testing.assert_array_equal(free, [1, 3])
    assert np.all((chances > 0) & (chances < 1))


def test_r_design_with_two_threads_seeds_and_samples_atomically(monkeypatch):
    """R has one random state: between a thread's seed and its sample no other thread may set another."""
    steps = []

    def seed(number):
        steps.append("seed")
        if len(steps) == 1:
            other.start()
            other.join(0.2)  # it has to wait for this thread's sample

    def sample(*_):
        steps.append("sample")
        return np.array([1.0, 0.0, 1.0])

    conversion = SimpleNamespace(localconverter=lambda rules: nullcontext())
    monkeypatch.setitem(sys.modules, "rpy2.robjects", SimpleNamespace(conversion=conversion, default_converter=None))
    monkeypatch.setattr(r, "require", lambda name: SimpleNamespace(set_seed=seed))
    monkeypatch.setattr(r, "call", sample)
    design = r.RDesign("UPbrewer", np.array([0.9, 0.2, 0.9]), 2)
    other = Thread(target=design.draw, args=(np.random.default_rng(1), 1))
    assert design.draw(np.random.default_rng(0), 1).tolist() == [[0, 2]]
    other.join()
    assert steps == ["seed", "sample"] * 2


@pytest.mark.parametrize("design", [name for name in DESIGNS if name.startswith("r_")])
def test_r_designs_without_rpy2_raise_importerror_with_the_remedy(monkeypatch, design):
    monkeypatch.setitem(sys.modules, "rpy2.robjects.packages", None)
    r.require.cache_clear()
    with pytest.raises(ImportError, match="install R with its packages sampling and BiasedUrn"):
        fit([0.5, 0.5], design).draw(np.random.default_rng(0))
    r.require.cache_clear()
