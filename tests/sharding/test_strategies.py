"""Inclusion probabilities and multipliers of every strategy."""

import numpy as np
import pytest

from sharding import STRATEGIES, Allocation, LayerContext, UserError
from sharding.terms.strategies import norm_ratio

MAGNITUDES = np.array([5.0, 3.0, 2.0, 1.0, 0.5, 0.25])
UNBIASED = ["unbiased", "schatten", "prism_wallenius", "prism_wallenius_clip"]
NAMES = [name for name, strategy in STRATEGIES.items() if strategy.allocate is not None]


def allocation_of(name, num_clients=4, keep_ratio=0.5, magnitudes=MAGNITUDES, num_terms=3):
    return STRATEGIES[name].allocate(LayerContext(magnitudes, num_terms, num_clients, keep_ratio))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_clients", [1, 2, 10])
@pytest.mark.parametrize("magnitudes", [MAGNITUDES, np.ones(6), np.geomspace(1, 1e-12, 6), np.zeros(6)], ids=str)
def test_allocation_of_any_strategy_is_feasible(name, num_clients, magnitudes):
    allocation = allocation_of(name, num_clients, magnitudes=magnitudes)
    assert allocation.inclusion.sum() == pytest.approx(3, abs=1e-9)
    assert np.all((allocation.inclusion >= 0) & (allocation.inclusion <= 1))
    assert np.all(np.isfinite(allocation.multipliers))
    assert np.all(allocation.multipliers > 0)


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_strategies_have_reciprocal_multipliers(name):
    allocation = allocation_of(name)
    np.testing.assert_allclose(allocation.inclusion * allocation.multipliers, 1, rtol=1e-12)


@pytest.mark.parametrize("name", ["top_n", "prism", "full"])
def test_plain_strategies_have_multipliers_of_one(name):
    assert np.all(allocation_of(name).multipliers == 1)


def test_prism_at_small_keep_ratios_has_a_larger_exponent():
    small, large = allocation_of("prism", keep_ratio=0.2), allocation_of("prism", keep_ratio=0.21)
    np.testing.assert_allclose(small.weights, (MAGNITUDES / 5) ** 4)
    np.testing.assert_allclose(large.weights, (MAGNITUDES / 5) ** 2.5)


def test_clipping_and_rescaling_strategies_are_the_published_ones():
    unclipped = {name for name, strategy in STRATEGIES.items() if not strategy.clips}
    assert unclipped == {"prism_wallenius", "prism_scaled", "top_n_scaled"}
    assert {name for name, strategy in STRATEGIES.items() if strategy.rescales} == {"top_n_scaled", "prism_scaled"}


def test_norm_ratio_of_drawn_terms_restores_the_frobenius_norm():
    drawn = np.array([0, 3])
    omega = norm_ratio(MAGNITUDES, drawn)
    assert np.sum((omega * MAGNITUDES[drawn]) ** 2) == pytest.approx(np.sum(MAGNITUDES**2))
    assert norm_ratio(np.zeros(3), np.array([0])) == 1


@pytest.mark.parametrize(
    ("pi", "weights", "words"),
    [
        ([1.0, 1.0, 0.0], [1.0, 1.0, 1.0], "term 2 has π = 0 and weight 1; both must be above 0, or neither"),
        ([0.5, 0.5, 1.0], [0.0, 1.0, 1.0], "term 0 has π = 0.5 and weight 0;"),
        *(([1.0, 1.0, 0.0], [1.0] * n, rf"weights has shape \({n},\); one number for each of 3 terms") for n in (2, 4)),
        ([0.5, 1.5, 0.0], [1.0, 1.0, 0.0], r"π\[1\] is 1.5; probabilities in \[0, 1\] are needed"),
    ],
)
def test_an_allocation_whose_weights_cannot_have_its_probabilities_is_refused(pi, weights, words):
    with pytest.raises(UserError, match=words):
        Allocation(np.array(pi), np.ones(3), np.array(weights)).checked(3, 2)
    Allocation(np.array([1.0, 1.0, 0.0]), np.ones(3), np.array([1.0, 1.0, 0.0])).checked(3, 2)


def test_prism_gives_every_term_a_positive_probability():
    allocation = allocation_of("prism", 1, 0.1, np.geomspace(1, 1e-30, 512), 51)
    allocation.checked(512, 51)
    assert allocation.inclusion.min() > 0
