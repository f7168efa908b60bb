"""Coordinated draws: every client's own law is untouched, and only the counts of the terms change."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import COORDINATIONS, STRATEGIES, UserError, collective_inclusion, coordinated_inclusion, discrepancy
from sharding.coordination import round_at_random, shared, spread
from sharding.designs import fit
from sharding.planner import ShardPlanner
from sharding.rng import generator
from sharding.strategies import Group
from tests.sharding.models import make_net

MAGNITUDES = np.arange(1, 513) ** -0.5


def generators(seed):
    return lambda owner: generator(seed, owner)


@st.composite
def problems(draw):
    """(π, C, seed): any π with a whole sum, some of it at 0 and 1."""
    size = draw(st.integers(2, 12))
    num_terms = draw(st.integers(1, size))
    magnitudes = np.array(draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.0]), min_size=size, max_size=size)))
    inclusion, _ = collective_inclusion(magnitudes, num_terms, 5)
    return inclusion, draw(st.integers(1, 9)), draw(st.integers(0, 2**20))


@given(problems())
def test_spread_gives_everyone_n_terms_and_each_term_to_its_rounded_number_of_clients(problem):
    inclusion, num_clients, seed = problem
    draws = spread(fit(inclusion), list(range(num_clients)), generators(seed))
    assert draws.shape == (num_clients, round(inclusion.sum()))
    assert np.all(np.diff(draws, axis=1) > 0)
    counts = np.bincount(draws.ravel(), minlength=inclusion.size)
    expected = num_clients * inclusion
    assert np.all((counts >= np.floor(expected + 1e-6) - 1e-6) | np.isclose(counts, expected))
    assert np.all(np.abs(counts - expected) < 1 + 1e-6)


def test_rounding_keeps_the_means():
    """The numbers rounded up are a fixed-size sample with the fractional parts as π, so the means are exact: the
    sampler is handed those very fractions."""
    expected = np.array([2.5, 0.25, 0.25, 1.0, 0.75, 0.25])
    seen = []

    class Spy:
        def draw(self, rng):
            return rng

    def spy(fractions, design):
        seen.append((fractions, design))
        return Spy()

    for up in combinations([0, 1, 2, 4, 5], 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sharding.coordination.fit", spy)
            counts = round_at_random(expected, np.array(up))
        assert counts.tolist() == [int(x) + (i in up) for i, x in enumerate(expected)]
    np.testing.assert_allclose(seen[0][0], [0.5, 0.25, 0.25, 0.0, 0.75, 0.25])
    assert seen[0][1] == "cps"


def test_whole_numbers_need_no_rounding():
    assert round_at_random(np.array([2.0, 1 - 1e-12, 0.0]), None).tolist() == [2, 1, 0]


def test_each_seat_is_equally_likely_and_follows_the_clients_not_their_order():
    inclusion = np.array([0.5, 0.5, 0.5, 0.5])
    one = spread(fit(inclusion), ["a", "b"], generators(3))
    other = spread(fit(inclusion), ["b", "a"], generators(3))
    assert one.tolist() == other[::-1].tolist()
    held = np.array([np.isin(0, spread(fit(inclusion), ["a", "b"], generators(s))[0]) for s in range(400)])
    assert abs(held.mean() - 0.5) < 5 * 0.5 / 20  # five standard deviations


def test_shared_gives_everyone_the_same_terms():
    draws = shared(fit(np.full(8, 0.25)), [0, 1, 2], generators(0))
    assert draws.shape == (3, 2)
    assert np.all(draws == draws[0])


@pytest.mark.parametrize("coordination", COORDINATIONS)
def test_marginals_are_kept(coordination):
    """Over many seeds, every client's count of every term is binomial: none strays by five standard deviations."""
    inclusion, _ = collective_inclusion(MAGNITUDES[:10], 3, 4)
    seeds, clients = 1500, [0, "b", 2]
    design, counts = fit(inclusion), np.zeros((3, 10))
    for seed in range(seeds):
        draws = COORDINATIONS[coordination](design, clients, generators(seed))
        np.add.at(counts, (np.arange(3)[:, None], draws), 1)
    deviation = np.sqrt(seeds * inclusion * (1 - inclusion)) + 1e-9
    assert np.all(np.abs(counts - seeds * inclusion) <= 5 * deviation)


def spread_discrepancy(magnitudes, inclusion, multipliers, num_clients):
    """E‖W − W̄‖² with E K = Cπ and E K² = x² + f(1 − f)."""
    x = num_clients * inclusion
    fraction = x - np.floor(x)
    a = multipliers / num_clients
    return float(np.sum(magnitudes**2 * (1 - 2 * a * x + a**2 * (x**2 + fraction * (1 - fraction)))))


def test_spreading_brings_the_average_as_near_as_the_issue_found():
    """λ = i^−½, N = 512, n = 52, C = 10: relative squared error 0.215 independent, 0.113 spread."""
    inclusion, paper = collective_inclusion(MAGNITUDES, 52, 10)
    multipliers = STRATEGIES["collective"].law(Group(MAGNITUDES, 52, 10, 0.1, "spread")).multipliers
    norm = np.sum(MAGNITUDES**2)
    assert discrepancy(MAGNITUDES, inclusion, paper, 10) / norm == pytest.approx(0.215, abs=5e-4)
    draws = [spread(fit(inclusion), list(range(10)), generators(seed)) for seed in range(20)]
    errors = []
    for hands in draws:
        counts = np.bincount(hands.ravel(), minlength=512)
        errors.append(np.sum(MAGNITUDES**2 * (1 - multipliers * counts / 10) ** 2) / norm)
    assert np.mean(errors) == pytest.approx(spread_discrepancy(MAGNITUDES, inclusion, multipliers, 10) / norm, rel=0.05)
    assert spread_discrepancy(MAGNITUDES, inclusion, multipliers, 10) / norm == pytest.approx(0.113, abs=5e-4)


@pytest.mark.parametrize(("num_terms", "num_clients"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 4)])
def test_coordinated_inclusion_is_the_best_on_a_grid(num_terms, num_clients):
    """Against every x on a grid of eighths, with ω at its optimum C·x/(x² + f(1 − f))."""
    magnitudes = np.array([3.0, 2.0, 1.0, 0.5])
    inclusion, multipliers = coordinated_inclusion(magnitudes, num_terms, num_clients)
    ours = spread_discrepancy(magnitudes, inclusion, multipliers, num_clients)
    steps = 8
    grid = np.arange(steps * num_clients + 1) / steps
    free = np.stack(np.meshgrid(grid, grid, grid, indexing="ij"), axis=-1).reshape(-1, 3)
    x = np.column_stack([free, num_terms * num_clients - free.sum(axis=1)])
    x = x[(x[:, 3] >= 0) & (x[:, 3] <= num_clients)]
    spare = (x - np.floor(x)) * (1 - x + np.floor(x))
    lost = np.divide(spare, x**2 + spare, out=np.ones_like(x), where=x > 0)
    assert ours <= (lost @ magnitudes**2).min() + 1e-12
    assert inclusion.sum() == pytest.approx(num_terms)


@given(
    magnitudes=st.lists(st.floats(0, 1e3), min_size=1, max_size=9),
    num_clients=st.integers(1, 6),
    data=st.data(),
)
def test_coordinated_inclusion_is_feasible_whole_and_ordered(magnitudes, num_clients, data):
    magnitudes = np.sort(magnitudes)[::-1]
    num_terms = data.draw(st.integers(1, magnitudes.size))
    inclusion, multipliers = coordinated_inclusion(magnitudes, num_terms, num_clients)
    counts = inclusion * num_clients
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-9)
    assert counts.sum() == pytest.approx(num_terms * num_clients)
    assert np.all((inclusion >= 0) & (inclusion <= 1))
    assert np.all(np.diff(inclusion) <= 1e-12)
    np.testing.assert_allclose((inclusion * multipliers)[inclusion > 0], 1)


def test_one_client_gets_the_largest_terms():
    inclusion, multipliers = coordinated_inclusion(np.array([1.0, 3.0, 2.0]), 2, 1)
    assert inclusion.tolist() == [0, 1, 1]
    assert multipliers.tolist() == [1, 1, 1]


@pytest.mark.parametrize("coordination", COORDINATIONS)
def test_mixed_keep_ratios_work_in_one_round(coordination):
    planner = ShardPlanner("unbiased", coordination=coordination)
    plan = planner.plan(make_net(), {"a": 0.25, "b": 0.5, "c": 0.25, "d": 0.5})
    assert [len(shard.terms["1"].indices) for shard in plan.values()] == [2, 4, 2, 4]


def test_the_coordinated_strategy_reconstructs_exactly_when_the_group_can_hold_everything():
    plan = ShardPlanner("coordinated").plan(make_net().double(), dict.fromkeys(range(4), 0.25))
    for name, spectrum in plan.spectra.items():
        mean = sum((s.terms[name].u * s.terms[name].multipliers) @ s.terms[name].v.mT for s in plan.values()) / 4
        np.testing.assert_allclose(mean.numpy(), spectrum.compose().numpy(), atol=1e-12)


def test_unknown_coordinations_are_told():
    with pytest.raises(UserError, match=r"unknown coordination 'spred' \(did you mean 'spread'\?\)"):
        ShardPlanner("unbiased", coordination="spred")
    with pytest.raises(UserError, match="num_clients is 0"):
        coordinated_inclusion([1.0], 1, 0)
