import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.client_sampling import Profiles, round_time

TIME = st.one_of(st.floats(1e-6, 1e6), st.just(0.0), st.just(1.0))


@given(st.lists(st.tuples(TIME, TIME), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_round_time_of_any_clients_uses_the_full_bandwidth(times, bandwidth):
    tau, t = np.array(times).T
    finish = round_time(tau, t, bandwidth)
    assert finish >= tau.max()
    senders = t > 0
    if senders.any():
        # T itself is exact to its last digits; what that means for the band shows in its bounds.
        with np.errstate(divide="ignore"):
            early, late = (np.sum(t[senders] / bandwidth / (finish * (1 + e) - tau[senders])) for e in (-1e-14, 1e-14))
        assert late <= 1 + 1e-9
        waits = finish == tau.max() or np.any(finish * (1 - 1e-14) <= tau[senders])  # for one who hardly sends
        assert early >= 1 - 1e-9 or waits


def test_round_time_with_tiny_communication_times_stays_accurate():
    assert round_time([1e6, 1.0], [1e-9, 1.0], 1e3) == 1e6
    assert round_time([0.0, 0.0], [1e-200, 3e-200], 1.0) == pytest.approx(4e-200, rel=1e-12)


def test_round_time_of_one_or_equal_clients_is_exact():
    assert round_time([2.0], [3.0], 1.5) == pytest.approx(4.0, rel=1e-15)
    assert round_time([1.0] * 5, [2.0] * 5, 1.0) == pytest.approx(11.0, rel=1e-15)
    assert round_time([3.0, 1.0], [0.0, 1.0], 1.0) == 3.0
    assert round_time([], [], 1.0) == 0.0


@pytest.mark.parametrize(
    "profiles",
    [Profiles.draw(3, 2.0, np.random.default_rng(0)), Profiles([1, 2, 3], [1, 1, 4], 2)],
    ids=["drawn", "lists"],
)
def test_profiles_costs_and_round_time_equal_their_formulas(profiles):
    compute, communicate = profiles.compute[[0, 2]], profiles.communicate[[0, 2]]
    np.testing.assert_allclose(profiles.costs(4), 4 * profiles.communicate / 2.0 + profiles.compute)
    assert profiles.round_time([0, 2]) == round_time(compute, communicate, 2.0)
    assert profiles.round_time([0, 2], [2]) == pytest.approx(compute.max() + communicate[1] / 2.0)
    assert profiles.round_time([0, 2], []) == compute.max()


def test_profiles_draw_has_exponential_and_uniform_moments():
    profiles = Profiles.draw(4000, 1.0, np.random.default_rng(1), compute=0.5, communicate=(0.22, 5.04))
    assert profiles.compute.mean() == pytest.approx(0.5, abs=0.04)
    assert profiles.compute.std() == pytest.approx(0.5, abs=0.06)
    assert profiles.communicate.mean() == pytest.approx(2.63, abs=0.1)
    assert profiles.communicate.std() == pytest.approx(1.39, abs=0.1)
    assert 0.22 <= profiles.communicate.min() < profiles.communicate.max() <= 5.04
