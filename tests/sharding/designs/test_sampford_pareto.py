import numpy as np
import pytest
from scipy.integrate import quad

from sharding.designs import DESIGNS
from tests import reference
from tests.sharding.designs.scripted import HIGH, LOW, Scripted, pieces

PI = np.array([0.1, 0.2, 0.3, 0.6, 0.8])
ROWS = 64  # at least as many outcomes as a block has


class Outcomes(Scripted):
    """Hands out the first outcome as prepared, and after it another that is always accepted."""

    def __init__(self, coins, forced):
        super().__init__()
        self._first = True
        self._coins, self._forced = coins, forced

    def random(self, shape):
        """Return coins for a pair, the forced coin's number for a single size."""
        if isinstance(shape, tuple):
            values = np.tile(np.where([1, 0, 0, 0, 0], LOW, HIGH), (shape[0], 1))
            values[0] = self._coins
            return values
        values = np.full(shape, HIGH)  # forces the last coin
        values[0] = self._forced
        return values


def drawn(coins, forced):
    return set(DESIGNS["sampford"](PI, 2).draw(Outcomes(coins, forced), 1)[0].tolist())


def test_sampfords_own_thresholds_give_pi():
    # Which coin is forced: coin 1 alone shows heads, so the sample is {1, forced} unless that is 1 itself.
    tails = np.full(5, HIGH)
    one = np.where(np.arange(5) == 1, LOW, HIGH)
    forced_chance, at = np.zeros(5), np.zeros(5)
    for length, middle in pieces(lambda u: tuple(sorted(drawn(one, u)))):
        rest = drawn(one, middle) - {1}
        k = rest.pop() if drawn(one, middle) != {0, 4} else 1
        forced_chance[k] += length
        at[k] = middle
    np.testing.assert_allclose(forced_chance, PI * (1 - PI) / sum(PI * (1 - PI)), atol=1e-9)

    coins = np.zeros(5)
    for i in range(5):
        k = 3 if i != 3 else 2  # with k forced, heads of i complete the sample; tails leave it to the next outcome
        low, high = 0.0, 1.0
        for _ in range(60):
            row = tails.copy()
            row[i] = 0.5 * (low + high)
            low, high = (row[i], high) if drawn(row, at[k]) == {i, k} else (low, row[i])
        coins[i] = high

    chance = {
        (i, j): sum(
            forced_chance[k] * coins[other] * np.prod([1 - coins[m] for m in range(5) if m not in (i, j)])
            for k, other in ((i, j), (j, i))
        )
        for i in range(5)
        for j in range(i + 1, 5)
    }
    law = {s: c / sum(chance.values()) for s, c in chance.items()}
    np.testing.assert_allclose(reference.inclusion_of(law, 5), PI, rtol=0, atol=1e-9)
    for s, expected in reference.sampford_law(PI).items():
        assert law[s] == pytest.approx(expected, abs=1e-9)


def test_sampford_forces_a_coin_that_must_not_be_counted_twice():
    assert drawn(np.where(np.arange(5) == 4, LOW, HIGH), HIGH) == {
        0,
        4,
    }  # forced 4, heads 4: one term, rejected


def test_pareto_compares_scores():
    """Of two terms the one with the smaller U/(1 − U) over its odds is drawn."""
    pi = np.array([0.3, 0.7])
    sampler = DESIGNS["pareto"](pi, 1)
    u = 0.4
    odds = u / (1 - u) * (0.7 / 0.3) * (0.7 / 0.3)
    threshold = odds / (1 + odds)
    assert sampler.draw(Scripted([u, threshold * (1 - 1e-9)]), 1).tolist() == [[1]]
    assert sampler.draw(Scripted([u, threshold * (1 + 1e-9)]), 1).tolist() == [[0]]


def test_paretos_error_is_what_its_docstring_says():
    pi = np.array([0.15, 0.25, 0.35, 0.35, 0.4, 0.5])
    odds = pi / (1 - pi)

    def chance(i):
        def integrand(u):
            score = u / (1 - u) / odds[i]
            others = np.delete(odds, i) * score
            beaten = others / (1 + others)
            none = np.prod(1 - beaten)
            return none + none * np.sum(beaten / (1 - beaten))  # at most one of the others has a smaller score

        return quad(integrand, 0, 1, epsabs=1e-12)[0]

    inclusion = np.array([chance(i) for i in range(6)])
    assert inclusion.sum() == pytest.approx(2.0, abs=1e-9)
    assert 1e-4 < np.abs(inclusion / pi - 1).max() < 0.02
