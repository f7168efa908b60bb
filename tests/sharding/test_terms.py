"""How many terms a layer keeps: ratios by pattern, energy, budgets; and the report."""

import re
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sharding import Budget, Energy, UserError, factorize
from sharding.factorization import CoverageWarning
from sharding.factorization.terms import Cost, allocate


def net(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).double()


def terms_of(report):
    return {name: layer.num_terms for name, layer in report.layers.items()}


def test_layers_that_would_grow_stay_dense_unless_all_terms_are_kept():
    model = net(8, 64, 8, 8)
    with pytest.warns(CoverageWarning, match="nothing is factorized; what stays dense: would grow 100"):
        report = factorize(model, 0.9, skip=()).factorize_report
    assert report.unfactorized == dict.fromkeys("012", "would grow")
    assert terms_of(factorize(model, 1.0, skip=()).factorize_report) == dict.fromkeys("012", 8)


@pytest.mark.filterwarnings("ignore:nothing is factorized")
def test_layer_is_factorized_exactly_where_it_does_not_grow():
    for terms in range(1, 9):
        report = factorize(nn.Linear(8, 24), terms / 8, skip=()).factorize_report
        assert bool(report.layers) == (terms * 32 <= 192 or terms == 8)
        assert report.parameters_after <= report.parameters_before or terms == 8
        assert report.layers or report.unfactorized == {"": "would grow"}


def test_keep_ratio_by_pattern_uses_the_first_match():
    model = nn.ModuleDict({"attn": net(16, 16, 16), "mlp": net(16, 32, 16), "norm": net(16, 16)})
    ratios = {"mlp.0": 0.125, "mlp": 0.5, lambda name, layer: name.startswith("attn"): 0.25}
    report = factorize(model, ratios, skip=()).factorize_report
    assert terms_of(report) == {"attn.0": 4, "attn.1": 4, "mlp.0": 2, "mlp.1": 8}
    assert report.unfactorized == {"norm.0": "no keep ratio is given for it"}
    with pytest.raises(UserError, match="keep_ratio pattern 'mpl' matches no layer"):
        factorize(model, {"mpl": 0.5})


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
def test_energy_keeps_the_fewest_terms_that_reach_the_share(share):
    model = nn.Sequential(*net(60, 50, 40), nn.Conv2d(8, 8, 3, groups=2).double())
    report = factorize(model, Energy(share), skip=()).factorize_report
    for name, layer in report.layers.items():
        weight = model.get_submodule(name).weight.detach()
        blocks = weight.flatten(1).unflatten(0, (2 if name == "2" else 1, -1))
        kept = torch.linalg.svdvals(blocks).square().sum(dim=0).cumsum(0)
        kept = kept / kept[-1]
        assert kept[layer.num_terms - 1] >= share - 1e-12
        assert layer.num_terms == 1 or kept[layer.num_terms - 2] < share
        assert layer.energy == pytest.approx(kept[layer.num_terms - 1].item(), abs=1e-9)


@pytest.mark.parametrize("parameters", [1_000, 2_000, 4_000, 7_000])
def test_budget_of_parameters_is_used_but_not_exceeded(parameters):
    model = net(40, 60, 50, 30, 20)
    report = factorize(model, Budget(parameters=parameters), skip=()).factorize_report
    assert report.parameters_after <= parameters
    assert report.parameters_after > min(parameters, report.parameters_before) - 110  # the dearest term


@pytest.mark.parametrize("budget", [Energy(0.9), Budget(parameters=4000)], ids=str)
def test_energy_and_budget_on_meta_raise(budget):
    with torch.device("meta"):
        model = net(40, 60, 50, 30)
    with pytest.raises(
        UserError, match=rf"{re.escape(str(budget))} depends on the weights, and 0 is on the meta device"
    ):
        factorize(model, budget, skip=())


def test_budget_below_one_term_per_layer_raises():
    with pytest.raises(UserError, match=r"the budget of 100 is too small: 50 for what stays dense and 90 for one term"):
        factorize(net(40, 50, 40)[:1], Budget(parameters=100), skip=())


@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(0.05, 1.2))
def test_allocate_of_any_shapes_spends_the_budget_without_exceeding_it(seed, count, share):
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(2, 12, size=2)) for _ in range(count)]
    spectra = {str(i): np.sort(rng.exponential(size=min(shape)))[::-1] for i, shape in enumerate(shapes)}
    costs = {str(i): Cost(int(a * b), int(a + b)) for i, (a, b) in enumerate(shapes)}
    least = sum(cost.term for cost in costs.values())
    budget = max(least, share * sum(cost.dense for cost in costs.values()))
    terms = allocate(spectra, costs, budget)
    spent = sum(costs[name].dense if isinstance(n, str) else n * costs[name].term for name, n in terms.items())
    assert spent <= budget
    for name, n in terms.items():
        assert isinstance(n, str) or 1 <= n <= len(spectra[name])
        assert isinstance(n, str) or n * costs[name].term <= costs[name].dense
        could = isinstance(n, int) and n < len(spectra[name]) and (n + 1) * costs[name].term <= costs[name].dense
        assert not could or spent + costs[name].term > budget


def test_allocate_with_equal_costs_has_the_most_energy():
    """Against all splits, where every term costs the same."""
    rng = np.random.default_rng(0)
    spectra = {name: np.sort(rng.exponential(size=6))[::-1] for name in "abc"}
    terms = allocate(spectra, dict.fromkeys("abc", Cost(100, 10)), 90)

    def energy(split):
        return sum((spectra[name][:n] ** 2).sum() for name, n in zip("abc", split, strict=True))

    best = max((split for split in product(range(1, 7), repeat=3) if sum(split) == 9), key=energy)
    assert tuple(terms.values()) == best


def test_allocate_with_a_budget_for_all_keeps_growing_layers_dense():
    spectra = {"a": np.array([3.0, 2.0, 1.0]), "b": np.array([3.0, 2.0])}
    assert allocate(spectra, {"a": Cost(9, 4), "b": Cost(100, 4)}, 17) == {"a": "would grow", "b": 2}


def test_report_of_a_small_model_has_the_documented_lines():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))
    report = factorize(model, 0.25).factorize_report
    layer = report.layers["1"]
    assert (layer.kind, layer.rank, layer.num_terms) == ("Linear", 16, 4)
    assert layer.parameters == (256, 128)
    assert report.coverage == pytest.approx(512 / report.parameters_before)
    lines = str(report).splitlines()
    assert lines[0] == "factorized 2 layers, kept 2 dense: 788 -> 532 parameters (67.5%), coverage 65.0%"
    assert lines[2].split()[:8] == ["*", "2", "Linear", "16", "4", "512", "->", "256"]
    assert lines[3] == "  N: singular terms, n: terms kept, energy: the share of ‖W‖² that these hold"
    assert lines[4:] == [
        "kept dense:  18.3%  default skip: first layer",
        "kept dense:   8.6%  default skip: last layer",
        "kept dense:   4.1%  Linear.bias",
        "kept dense:   2.0%  LayerNorm.weight",
        "kept dense:   2.0%  LayerNorm.bias",
    ]


def test_report_of_numbered_layers_has_one_line_per_kind():
    parts = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(50))
    model = nn.Sequential(*parts, nn.Sequential(nn.Embedding(8, 8)))
    text = str(factorize(model, 0.25, skip=(), also=nn.Embedding).factorize_report)
    assert re.search(r"\*\.\* +150 Linear +8 +2 ", text)
    assert re.search(r"50\.0 +1 Embedding +8 +2 ", text)
