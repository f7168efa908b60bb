"""Samplers: which clients they invite and select, unbiasedness of their weights, and invalid reports."""

from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest

import sharding.terms.designs
from sharding import SAMPLERS, Population, draw_terms, optimal_inclusion
from sharding.client_sampling import Profiles, aocs_probabilities, improvement_factors, plain_sum
from sharding.client_sampling.sampler import WithReplacement, upload_coins
from sharding.rng import generator
from sharding.rounds.failures import Failure, Kind
from tests.sharding.designs.scripted import Scripted

SIZES = np.array([10.0, 40.0, 5.0, 25.0, 20.0])
RATIOS = np.array([0.2, 1.0, 0.4, 0.4, 0.2])
POPULATION = Population(SIZES, RATIOS, Profiles(np.arange(1.0, 6.0), np.ones(5), 2.0))
TWO_STAGE = ("ocs", "aocs", "ocs_partial")


def make(name, per_round=5, **options):
    return SAMPLERS[name](5, per_round, 7, POPULATION, **options)


@pytest.mark.parametrize("name", TWO_STAGE)
def test_two_stage_samplers_weigh_by_size_over_probability(name):
    sampler = make(name, budget=1.5)
    cohort = sampler.invite(3)
    assert cohort == [0, 1, 2, 3, 4]
    norms = dict(zip(cohort, [3.0, 0.5, 1.0, 2.0, 0.1], strict=True))
    u = SIZES / SIZES.sum() * np.array(list(norms.values()))
    p = {
        "ocs": optimal_inclusion(u, 1.5),
        "aocs": aocs_probabilities(u, 1.5, plain_sum),
        "ocs_partial": optimal_inclusion(u, 1.5, RATIOS),
    }[name]
    for t in range(20):
        participation = sampler.select(t, cohort, norms)
        assert participation.total == SIZES.sum()
        for client, weight in participation.weights.items():
            assert weight == SIZES[client] / p[client]
    alpha, gamma = improvement_factors(u, p, p.sum())
    assert participation.metrics == {"improvement_alpha": alpha, "improvement_gamma": gamma}
    assert participation.report_bytes == 4 * 5 * {"ocs": 1, "ocs_partial": 1, "aocs": 4}[name]


def test_uniform_upload_invites_by_independent_coins_and_is_unbiased():
    sampler, m, n = make("uniform_upload", 4, budget=1.5), 1.5, 4
    invited = make("ocs", 4, budget=1.5)  # the same seed, the same cohort
    for t in range(50):
        cohort, invited_cohort = sampler.invite(t), invited.invite(t)
        assert cohort == [c for c in invited_cohort if upload_coins(7, t, 5)[c] < m / n]
        participation = sampler.select(t, cohort, {})
        assert participation.weights == {c: SIZES[c] * n / m for c in cohort}  # over the chance m/n: unbiased
        assert participation.total == SIZES[invited_cohort].sum()
    assert not sampler.needs_norms


def test_uniform_scaled_invites_like_uniform_with_equal_weights():
    sampler, uniform = make("uniform_scaled", 3), make("uniform", 3)
    assert sampler.invite(2) == uniform.invite(2)
    assert sampler.select(2, [0, 3], {}).weights == {0: 1.0, 3: 1.0}
    assert sampler.select(2, [0, 3], {}).total is None
    np.testing.assert_allclose(sampler.lr_scales, [0.5, 2.0, 0.25, 1.25, 1.0])
    assert uniform.lr_scales is None


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", TWO_STAGE)
def test_select_with_an_invalid_norm_rejects_the_client_and_draws_evenly(name, norm, caplog):
    sampler = make(name, budget=0.5)
    norms = {0: 1.0, 1: norm, 2: 5.0, 4: 0.1}  # client 3 did not report at all
    p = 0.5 / (RATIOS[[0, 2, 4]].sum() if name == "ocs_partial" else 3)  # the expected cost is the budget
    for t in range(50):
        participation = sampler.select(t, sampler.invite(t), norms)
        assert participation.rejected == {1: Failure(Kind.NOT_FINITE, f"reported a norm of {norm}")}
        assert participation.weights == {c: pytest.approx(SIZES[c] / p) for c in participation.weights}
        assert participation.report_bytes == 4 * 4
        assert participation.total == SIZES[[0, 2, 4]].sum()
    assert "clients [1]: no norm in round 0" in caplog.text


@pytest.mark.parametrize("q", [np.full(3, 1 / 3), np.array([0.5, 0.2, 0.3])])
def test_with_replacement_participation_is_unbiased(q):
    updates, sizes, mean = np.array([1.0, -2.0, 5.0]), np.array([1.0, 2.0, 4.0]), 0.0

    class Scripted:
        def choice(self, size, number, p):
            return np.array(self.draw)

    rng = Scripted()
    for rng.draw in product(range(3), repeat=4):
        participation = WithReplacement(q, 4, rng).participation(sizes)
        estimate = sum(weight * updates[j] for j, weight in participation.weights.items()) / participation.total
        mean += np.prod(q[list(rng.draw)]) * estimate
    assert mean == pytest.approx(sizes @ updates / sizes.sum(), rel=1e-12)


def test_weighted_with_replacement_gives_each_draw_the_same_weight():
    sampler = make("weighted", 3, replacement=True)
    for t in range(20):
        participation = sampler.select(t, sampler.invite(t), {})
        assert list(participation.weights) == sampler.invite(t)
        np.testing.assert_allclose(sum(participation.weights.values()), participation.total)
        draws = np.array(list(participation.weights.values())) * 3 / SIZES.sum()
        np.testing.assert_allclose(draws, np.round(draws))
        assert participation.draws == dict(
            zip(participation.weights, np.round(draws).astype(int).tolist(), strict=True)
        )


def test_weighted_without_replacement_weighs_by_its_inclusion():
    sampler, inclusion = make("weighted", 3), optimal_inclusion(SIZES, 3)
    for t in range(20):
        cohort = sampler.invite(t)
        assert cohort == draw_terms(inclusion, rng=generator(7, "invite", t)).tolist()
        participation = sampler.select(t, cohort, {})
        assert participation.weights == {c: SIZES[c] / inclusion[c] for c in cohort}
        assert participation.total == SIZES.sum()


def test_weighted_fits_its_design_once(monkeypatch):
    fit = Mock(wraps=sharding.terms.designs.fit)
    monkeypatch.setattr("sharding.client_sampling.uniform.fit", fit)
    sampler = make("weighted", 3)
    assert len({tuple(sampler.invite(t)) for t in range(10)}) > 1
    fit.assert_called_once()


@pytest.mark.parametrize("replacement", [False, True])
def test_weighted_never_invites_a_client_without_data(replacement):
    population = Population([0, 3, 0, 1], np.ones(4))
    sampler = SAMPLERS["weighted"](4, 3, 0, population, replacement=replacement)
    cohorts = [sampler.invite(t) for t in range(20)]
    assert {client for cohort in cohorts for client in cohort} == {1, 3}
    assert replacement or cohorts == [[1, 3]] * 20


def test_uniform_with_some_or_all_clients_weighs_by_size():
    for per_round in (2, 5):
        sampler = make("uniform", per_round)
        cohort = sampler.invite(1)
        assert len(cohort) == per_round
        participation = sampler.select(1, cohort, {})
        assert participation.weights == {c: SIZES[c] for c in cohort}
        assert participation.total is None


@pytest.mark.parametrize("name", ["wireless", "statistical"])
def test_load_state_dict_continues_with_the_same_probabilities(name):
    first, other = make(name, 3), make(name, 3)
    for t in range(5):
        cohort = first.invite(t)
        first.select(t, cohort, dict.fromkeys(cohort, 1.0 + t) | {cohort[0]: float("nan")})
    other.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(first.probabilities(), other.probabilities())
    assert np.isclose(first.probabilities().sum(), 1)
    assert first.invite(9) == other.invite(9)
    assert not first.state_dict()["gradient_norms"].isinf().any()
    first.learn(np.arange(5.0))
    first.select(9, first.invite(9), dict.fromkeys(range(5), 7.0))
    np.testing.assert_array_equal(first.state_dict()["gradient_norms"], np.arange(5.0))


def test_wireless_with_large_beta_prefers_fast_clients():
    q = make("wireless", 3, beta_over_alpha=10.0).probabilities() / make("statistical", 3).probabilities()
    assert np.all(np.diff(q) < 0)  # τ rises from client to client


def test_mmfl_with_baseline_signals_has_their_probabilities():
    signals = np.ones((5, 2))
    np.testing.assert_allclose(make("mmfl", budget=2, signal="uniform").probabilities(0, signals), np.full((5, 2), 0.2))
    turns = make("mmfl", budget=2, signal="round_robin")
    for t in range(3):  # the first client starts with the first model, the second with the second, …
        expected = [[0.4, 0.0] if (i + t) % 2 == 0 else [0.0, 0.4] for i in range(5)]
        np.testing.assert_allclose(turns.probabilities(t, signals), expected)
    full = make("mmfl", budget=2, signal="full")
    assert full.assign(0, [0, 2], full.probabilities(0, signals[:2])) == [{0: 1.0, 2: 1.0}] * 2


@pytest.mark.parametrize("n", range(1, 11))
@pytest.mark.parametrize("name", TWO_STAGE)
def test_two_stage_select_over_all_outcomes_is_unbiased(name, n, monkeypatch):
    rng = np.random.default_rng(n)
    sizes, updates = rng.integers(1, 50, n).astype(float), rng.normal(size=n) * rng.lognormal(0, 2, n)
    ratios = rng.uniform(0.1, 1, n)
    sampler = SAMPLERS[name](n, n, 0, Population(sizes, ratios), budget=0.4 * n)
    norms = dict(enumerate(np.abs(updates)))
    monkeypatch.setattr("sharding.client_sampling.sampler.generator", lambda *key: Scripted(np.zeros(n)))
    everyone = sampler.select(0, list(range(n)), norms).weights  # coins of 0: all are selected
    p = np.array([sizes[c] / everyone[c] for c in range(n)])
    mean = chances = 0.0
    for draw in product([False, True], repeat=n):
        chance = np.prod(np.where(draw, p, 1 - p))
        monkeypatch.setattr(
            "sharding.client_sampling.sampler.generator", lambda *key, d=draw: Scripted(np.where(d, 0.0, 1.0))
        )
        participation = sampler.select(0, list(range(n)), norms)
        assert list(participation.weights) == list(np.flatnonzero(draw))
        mean += chance * sum(weight * updates[c] for c, weight in participation.weights.items()) / participation.total
        chances += chance
    assert chances == pytest.approx(1, rel=1e-12)
    assert mean == pytest.approx(sizes @ updates / sizes.sum(), rel=1e-10)


def test_mmfl_assign_over_all_outcomes_is_unbiased(monkeypatch):
    updates = np.random.default_rng(0).normal(size=(5, 2))
    sampler = make("mmfl", budget=3)
    p = sampler.probabilities(0, np.abs(updates))
    mean, ends = np.zeros(2), np.cumsum(p, axis=1)
    for outcome in product(range(3), repeat=5):  # the first model, the second, or none
        chance = np.prod([p[i, s] if s < 2 else 1 - ends[i, -1] for i, s in enumerate(outcome)])
        coins = [0.0 if s == 0 else ends[i, 0] if s == 1 else 1.0 for i, s in enumerate(outcome)]
        monkeypatch.setattr("sharding.client_sampling.sampler.generator", lambda *key, c=coins: Scripted(c))
        for s, part in enumerate(sampler.assign(0, list(range(5)), p)):
            if chance > 0:
                assert list(part) == [i for i, task in enumerate(outcome) if task == s]
            mean[s] += chance * sum(weight * updates[i, s] for i, weight in part.items())
    np.testing.assert_allclose(mean, updates.sum(axis=0), rtol=1e-10)


def test_select_without_reports_or_data_returns_no_weights():
    assert make("ocs", budget=1).select(0, [0, 1], {}).weights == {}
    sizes = np.zeros(5)
    sizes[0] = 7.0
    sampler = SAMPLERS["ocs"](5, 2, 0, Population(sizes, np.ones(5)), budget=1)
    assert not sampler.select(0, [1, 2], {1: 1.0, 2: 2.0}).weights


def test_sampler_with_integral_floats_and_lists_accepts_them():
    sampler = SAMPLERS["weighted"](4.0, 2.0, 0, Population([1, 2, 3, 4], [1, 1, 1, 1]), replacement=True)
    assert sampler.select(0, sampler.invite(0), {}).weights
