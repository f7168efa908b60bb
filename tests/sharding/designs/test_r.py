import os
import subprocess
import sys

import numpy as np
import pytest

from sharding import UserError, draw_terms, successive_inclusion
from sharding.terms.designs import r
from tests import reference

if "REQUIRE_R" not in os.environ:
    pytest.importorskip("rpy2", reason="needs the extra `r`")

pytestmark = [pytest.mark.r, pytest.mark.usefixtures("oracle")]

R_DESIGNS = ["r_cps", "r_brewer", "r_minimum_support"]
PI = np.array([0.15, 0.3, 0.4, 0.5, 0.75, 0.9])


@pytest.fixture
def oracle():
    """Skip where R, its packages or rpy2 are absent, but not in CI, which sets REQUIRE_R."""
    try:
        r.require("sampling")
        r.require("BiasedUrn")
    except UserError as error:
        if os.environ.get("REQUIRE_R"):
            raise
        pytest.skip(str(error))


def test_r_require_leaves_ld_library_path_unchanged():
    load = "import os; from sharding.terms.designs import r; r.require('sampling')"
    code = f"{load}; print(os.environ.get('LD_LIBRARY_PATH'))"
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


@pytest.mark.parametrize(("size", "n"), [(6, 3), (20, 5), (32, 4)])
def test_successive_inclusion_equals_biasedurn_wallenius_means(size, n):
    weights = np.arange(1, size + 1.0) ** -2
    expected = r.call("BiasedUrn", "meanMWNCHypergeo", np.ones(size), n, weights, 1e-10)
    np.testing.assert_allclose(successive_inclusion(weights, n), expected, rtol=0, atol=5e-8)


@pytest.mark.parametrize("design", R_DESIGNS)
@pytest.mark.parametrize(
    "pi", [PI, np.array([0.3, 0.7, 1.0, 0.0]), np.array([0.2, 0.3, 0.5]), np.full(10, 0.9)], ids=len
)
def test_r_designs_with_the_same_generator_seed_draw_equal_samples(design, pi):
    first = draw_terms(pi, design, rng=np.random.default_rng(1), size=30)
    assert first.shape == (30, round(pi.sum()))
    assert np.all(np.diff(first, axis=1) > 0)
    np.testing.assert_array_equal(first, draw_terms(pi, design, rng=np.random.default_rng(1), size=30))
    assert not np.array_equal(first, draw_terms(pi, design, rng=np.random.default_rng(2), size=30))


@pytest.mark.parametrize("design", R_DESIGNS)
def test_r_designs_have_the_inclusion_frequencies(design):
    drawn = draw_terms(PI, design, rng=np.random.default_rng(0), size=4000)
    frequency = np.bincount(drawn.ravel(), minlength=6) / 4000
    assert np.all(np.abs(frequency - PI) <= 4.5 * np.sqrt(PI * (1 - PI) / 4000))


def test_brewer_pair_frequencies_equal_those_of_r():
    drawn = draw_terms(PI, "r_brewer", rng=np.random.default_rng(0), size=4000)
    taken = np.zeros((4000, 6))
    np.put_along_axis(taken, drawn, 1.0, axis=1)
    joint = reference.joint_of(reference.brewer_distribution(PI), PI.size)
    assert np.all(np.abs(taken.T @ taken / 4000 - joint) <= 4.5 * np.sqrt(joint * (1 - joint) / 4000))
