"""Diagnostics against their definitions."""

from math import comb, log

import numpy as np
import pytest

from sharding import ShardPlanner
from sharding.rounds.diagnostics import anme, bernoulli_entropy, plan_anme, plan_coverage, plan_discrepancy
from tests.sharding.models import make_net, make_plan


def test_bernoulli_entropy_equals_its_definition():
    assert bernoulli_entropy(np.array([0.0, 0.5, 1.0])).tolist() == [0.0, log(2), 0.0]
    # The entropy of p is the growth rate of the binomial coefficients.
    assert bernoulli_entropy(0.25) == pytest.approx(log(comb(40000, 10000)) / 40000, rel=1e-3)


def test_anme_of_even_and_certain_draws_is_one_and_zero():
    assert anme([np.full(8, 0.25), np.full(3, 2 / 3)]) == pytest.approx(1)
    assert anme([np.array([1.0, 1.0, 0.0, 0.0])]) == 0
    assert anme([np.array([1.0, 0.0]), np.full(4, 0.5)]) == pytest.approx(0.5)
    assert np.isnan(anme([np.ones(5)]))
    assert anme([np.ones(5), np.full(4, 0.5)]) == pytest.approx(1)


def test_plan_discrepancy_equals_that_of_the_composed_shards():
    """Against the matrices that the clients compose from their shards."""
    model = make_net().double()
    for strategy in ("unbiased", "prism_scaled"):
        plan = make_plan(model, {"a": 0.25, "b": 0.5, "c": 0.25}, strategy)
        collective = single = norm = 0.0
        for name in plan.spectra:
            weight = model.get_submodule(name).weight.detach().flatten(1)
            composed = [(s.terms[name].u * s.terms[name].multipliers) @ s.terms[name].v.mT for _, s in plan.shards()]
            collective += float((weight - sum(composed) / 3).square().sum())
            single += sum(float((weight - estimate).square().sum()) for estimate in composed) / 3
            norm += float(weight.square().sum())
        assert plan_discrepancy(plan) == pytest.approx((collective / norm, single / norm), rel=1e-9)


def test_plan_discrepancy_of_clients_with_a_tail_is_that_of_the_strongest():
    model = make_net().double()
    planner = ShardPlanner("top_n", tail_format="float32")
    mixed, strong = (planner.plan(model, dict(enumerate(ratios)), 0) for ratios in ([0.25, 0.5, 0.25], [0.5]))
    assert any(mixed.tails.values())
    assert plan_discrepancy(mixed) == pytest.approx(plan_discrepancy(strong), rel=1e-12)
    alone = ShardPlanner("top_n", tail_format=None).plan(model, dict(enumerate([0.25, 0.5, 0.25])), 0)
    assert plan_discrepancy(alone)[1] > plan_discrepancy(mixed)[1]


def test_plan_anme_of_deterministic_strategies_is_zero_or_nan():
    model = make_net()
    assert plan_anme(make_plan(model, {0: 0.25}, "top_n")) == 0
    assert np.isnan(plan_anme(make_plan(model, {0: 0.25}, "dense")))
    assert np.isnan(plan_anme(make_plan(model, {0: 0.25}, "full")))
    assert plan_discrepancy(make_plan(model, {0: 0.25}, "full"))[0] == pytest.approx(0, abs=1e-12)
    assert np.isnan(plan_discrepancy(make_plan(model, {0: 0.25}, "dense"))[0])


def test_plan_coverage_equals_the_share_of_terms_sent_to_any_client():
    net = make_net()
    alone = make_plan(net, {"a": 0.25}, strategy="top_n")
    ranks = [len(spectrum.magnitudes) for spectrum in alone.spectra.values()]
    assert plan_coverage(alone) == pytest.approx(np.mean([-(-rank // 4) / rank for rank in ranks]))
    mixed = make_plan(net, {"a": 0.25, "b": 0.5, "c": 0.5})
    sent = [set().union(*(shard.terms[name].indices.tolist() for _, shard in mixed.shards())) for name in mixed.spectra]
    assert plan_coverage(mixed) == pytest.approx(np.mean([len(h) / rank for h, rank in zip(sent, ranks, strict=True)]))
    assert plan_coverage(make_plan(net, {"a": 0.1}, strategy="full")) == 1
    assert np.isnan(plan_coverage(make_plan(net, {"a": 0.1}, strategy="dense")))
