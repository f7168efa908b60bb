import numpy as np
import pytest

from sharding.client_sampling import estimate_beta_over_alpha, statistical_probabilities, wireless_probabilities


def test_wireless_probabilities_in_limiting_cases_are_exact():
    p, g, c = np.array([0.2, 0.3, 0.5]), np.array([1.0, 4.0, 2.0]), np.array([1.0, 9.0, 4.0])
    np.testing.assert_allclose(wireless_probabilities(p, g, c, 1e25, 3), [1, 0, 0], atol=1e-9)  # the fastest only
    even = wireless_probabilities(p, g, np.full(3, 7.0), 0.5, 3)  # equal times: time does not matter
    np.testing.assert_allclose(even, statistical_probabilities(p, g), rtol=1e-12)
    np.testing.assert_array_equal(wireless_probabilities([0.5, 0.5], [0, 0], [1, 2], 1, 3), [0.5, 0.5])
    np.testing.assert_array_equal(wireless_probabilities([0.5, 0.5], [0, 1], [1, 2], 1, 3), [0, 1])


def test_estimate_beta_over_alpha_from_exact_rounds_returns_the_ratio():
    rng = np.random.default_rng(0)
    p, g, ratio, cohort = rng.dirichlet(np.ones(20)), rng.lognormal(size=20), 0.03, 5

    def rounds(q):
        return np.sum((p * g) ** 2 / q) / cohort + ratio

    targets = np.array([1.0, 3.0, 10.0])
    uniform, weighted = targets * rounds(np.full(20, 1 / 20)), targets * rounds(p)
    assert estimate_beta_over_alpha(p, g, uniform, weighted, cohort)[0] == pytest.approx(ratio, rel=1e-9)


def test_estimate_beta_over_alpha_ignores_losses_that_contradict_the_bound(caplog):
    p, g = np.array([0.2, 0.3, 0.5]), np.array([1.0, 4.0, 2.0])
    highest = 3 * (p**2 @ g**2) / (p @ g**2)  # the ratio of rounds at β = 0; 1 is that of an endless β/α
    ratios = np.array([0.5, 1.0, (1 + highest) / 2, highest + 0.5])
    mean, each = estimate_beta_over_alpha(p, g, 10 * ratios, np.full(4, 10.0), 2)
    assert np.isfinite(each).tolist() == [False, False, True, False]
    assert mean == each[2]
    assert not caplog.text
    assert estimate_beta_over_alpha(p, g, 10 * ratios[:2], np.full(2, 10.0), 2)[0] == 0.0
    assert "β/α = 0" in caplog.text


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1e-100])
def test_wireless_probabilities_with_tiny_norms_are_finite(size):
    q = wireless_probabilities([1, 1], [size] * 2, [1, 2], 1, 2)
    assert np.isfinite(q).all()
    assert q.sum() == pytest.approx(1)
    assert q[0] > 0.999, "the bound is all β: the fastest client"
