from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import DESIGNS, optimal_inclusion
from sharding.terms.designs.conditional_poisson import fit_cps
from sharding.terms.inclusion import poisson_binomial as pb
from tests import reference
from tests.sharding.designs.scripted import HIGH, LOW, Scripted
from tests.sharding.inclusion.spectra import SPECTRA

PI = np.array([0.15, 0.3, 0.4, 0.5, 0.75, 0.9])


def inclusions():
    """π in (0, 1) of up to eight terms with an integer sum, some of them at 1e-12 from an end."""
    odds = st.one_of(st.floats(-27, 27), st.floats(-2, 2), st.sampled_from([-27.0, 0.0, 1.0, 27.0]))

    def integer_sum(log_odds):
        pi = pb.sigmoid(np.array(log_odds))
        count = min(max(round(pi.sum()), 1), pi.size - 1)
        for _ in range(3):
            total = pi.sum()
            pi = pi * count / total if total > count else 1 - (1 - pi) * (pi.size - count) / (pi.size - total)
        return np.clip(pi, 1e-13, 1 - 1e-13)

    return (
        st.lists(odds, min_size=2, max_size=8).map(integer_sum).filter(lambda pi: abs(pi.sum() % 1 - 0.5) > 0.4999999)
    )


@given(inclusions())
def test_fit_cps_equals_the_enumeration_of_all_subsets(pi):
    count = round(pi.sum())
    design = fit_cps(pi, count)
    np.testing.assert_allclose(
        reference.inclusion_of(reference.cps_distribution(design.coins, count), pi.size), pi, rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("size", "n"), [(64, 7), (512, 52), (512, 511), (512, 2), (4096, 410)])
def test_fit_cps_of_large_problems_equals_a_recursion(spectrum, size, n):
    pi = optimal_inclusion(SPECTRA[spectrum](size), n)
    free = pi[(pi > 1e-14) & (pi < 1)]
    if free.size < 2:
        pytest.skip("nothing is left to chance")
    count = round(free.sum())
    coins = fit_cps(free, count).coins
    np.testing.assert_allclose(inclusion_by_recursion(coins, count), free, rtol=0, atol=1e-11)


def inclusion_by_recursion(coins, count):
    """CPS inclusion by forward and backward convolutions of positive numbers (Tillé 2006, Section 5.6)."""
    size = coins.size
    forward = np.zeros((size + 1, count + 1))
    backward = np.zeros((size + 1, count + 1))
    forward[0, 0] = backward[size, 0] = 1.0
    for i in range(size):
        forward[i + 1] = forward[i] * (1 - coins[i])
        forward[i + 1, 1:] += forward[i, :-1] * coins[i]
    for i in reversed(range(size)):
        backward[i] = backward[i + 1] * (1 - coins[i])
        backward[i, 1:] += backward[i + 1, :-1] * coins[i]
    others = (forward[:-1, :count] * backward[1:, :count][:, ::-1]).sum(axis=1)
    return coins * others / forward[size, count]


def test_cps_draw_accepts_only_outcomes_of_the_right_size():
    design = DESIGNS["cps"](PI, 3)
    fallback = np.where([1, 1, 1, 0, 0, 0], LOW, HIGH)
    for heads in product([0, 1], repeat=6):
        rows = np.tile(fallback, (int(np.ceil(1 / design.hit)), 1))
        rows[0] = np.where(heads, LOW, HIGH)
        rows[0] = rows[0] if len(rows) > 1 else fallback
        drawn = design.draw(Scripted(rows, rows), 1)[0].tolist()
        expected = np.flatnonzero(heads).tolist() if sum(heads) == 3 else [0, 1, 2]
        assert drawn == expected


def test_cps_thresholds_have_the_inclusion_probabilities():
    design = DESIGNS["cps"](PI, 3)
    thresholds = [threshold_of(design, i) for i in range(6)]
    distribution = reference.cps_distribution(thresholds, 3)
    np.testing.assert_allclose(reference.inclusion_of(distribution, 6), PI, rtol=0, atol=1e-11)


def threshold_of(design, i):
    """Bisect the uniform of coin i: below the threshold, i completes the sample; above, the next outcome is taken."""
    others = [j for j in range(6) if j != i]
    rows = np.full((int(np.ceil(1 / design.hit)), 6), HIGH)
    rows[1:, others[:3]] = LOW
    rows[0, others[:2]] = LOW
    low, high = 0.0, 1.0
    for _ in range(60):
        rows[0, i] = 0.5 * (low + high)
        if i in design.draw(Scripted(rows.copy()), 1)[0]:
            low = rows[0, i]
        else:
            high = rows[0, i]
    return high


def test_cps_draw_of_many_samples_takes_consecutive_outcomes():
    design = DESIGNS["cps"](PI, 3)
    rng = np.random.default_rng(3)
    batch = design.draw(rng, 500)
    rows = np.random.default_rng(3).random((int(np.ceil(500 / design.hit)), 6)) < design.coins
    accepted = rows[rows.sum(axis=1) == 3][:500]
    np.testing.assert_array_equal(batch[: len(accepted)], [np.flatnonzero(row) for row in accepted])
