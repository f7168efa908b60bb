import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.terms.inclusion import poisson_binomial as pb

CHANCES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=40)


def by_convolution(p):
    distribution = np.ones(1)
    for chance in p:
        distribution = np.convolve(distribution, [1 - chance, chance])
    return distribution


@given(CHANCES)
def test_leave_one_out_probabilities_equal_convolution(p):
    p = np.array(p)
    count = min(max(round(p.sum()), 1), p.size - 1)
    less, same, total = pb.leave_one_out(p, count)
    for i in range(p.size):
        distribution = by_convolution(np.delete(p, i))
        assert less[i] == pytest.approx(distribution[count - 1], abs=1e-14)
        assert same[i] == pytest.approx(distribution[count], abs=1e-14)
    assert total == pytest.approx(by_convolution(p)[count], abs=1e-14)


def test_leave_one_out_of_many_trials_needs_few_angles():
    p = np.random.default_rng(0).random(2000) ** 4
    distribution = by_convolution(p)
    count = round(p.sum())
    assert pb.half_circle(float(p @ (1 - p)), p.size).size < 100
    assert pb.leave_one_out(p, count)[2] == pytest.approx(distribution[count], rel=1e-12)


@given(st.lists(st.floats(-60, 60), min_size=2, max_size=30), st.floats(0.05, 0.95))
def test_tilt_shifts_the_sum_to_the_count(log_odds, share):
    log_odds = np.array(log_odds)
    count = share * log_odds.size
    p = pb.sigmoid(log_odds + pb.tilt(log_odds, count))
    assert p.sum() == pytest.approx(count, abs=1e-5)


def test_sigmoid_of_extreme_values_is_accurate():
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(pb.sigmoid(np.array([-np.inf, 0.0, np.inf])), [0.0, 0.5, 1.0])
        assert pb.sigmoid(np.array([-40.0]))[0] == pytest.approx(np.exp(-40.0), rel=1e-12)
