"""What the library is given and cannot use, told in one line that names it."""

import numpy as np
import pytest
import torch
from torch import nn

from sharding import ShardPlanner, UserError, collective_inclusion, draw_terms, factorize, optimal_inclusion
from sharding.client_sampling import SAMPLERS, Population, Profiles, mmfl_probabilities, round_time
from sharding.errors import Failure, Kind, pick, shown
from sharding.inclusion import successive_inclusion
from sharding.optim import clip_factors
from sharding.svd.spectrum import decompose
from tests.sharding.models import make_net

NAN, INF = float("nan"), float("inf")
RNG = np.random.default_rng(0)
ONES = np.ones(4)
HALVES = [0.5, 0.5]


def spoiled(name: str, value: float) -> nn.Module:
    """The net with a NaN or Inf in one of its tensors."""
    net = make_net()
    with torch.no_grad():
        net.state_dict(keep_vars=True)[name].view(-1)[0] = value
    return net


def with_buffer(buffer: object) -> nn.Module:
    """The net with one buffer more, or with an entry in its state that is none."""
    net = make_net()
    if isinstance(buffer, torch.Tensor):
        net.register_buffer("more", buffer)
    else:
        net.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update(more=buffer))
    return net


def plan(budget, strategy="collective", net=None):
    return ShardPlanner(strategy).plan(net or make_net(), {"phone": budget})


def sampler(name="uniform", num_clients=4, per_round=2, population=None, **options):
    return SAMPLERS[name](num_clients, per_round, 0, population, **options)


def population(sizes=ONES, ratios=ONES, profiles=None):
    return Population(np.asarray(sizes), np.asarray(ratios), profiles)


CASES = {
    "NaN layer": (lambda: plan(0.5, net=spoiled("1.weight", NAN)), "layer 1: its weight has NaN or Inf"),
    "infinite layer": (lambda: plan(0.5, net=spoiled("4.weight", INF)), "layer 4: its weight has NaN or Inf"),
    "NaN bias": (lambda: plan(0.5, net=spoiled("1.bias", NAN)), "1.bias has NaN or Inf; did training diverge"),
    "NaN end": (lambda: plan(0.5, net=spoiled("0.weight", NAN)), "0.weight has NaN or Inf"),
    "NaN, dense": (lambda: plan(1.0, "dense", spoiled("1.weight", NAN)), "1.weight has NaN or Inf"),
    "quantized": (
        lambda: plan(1.0, "dense", with_buffer(torch.qint8)),
        "more is a dtype, which cannot be sent; quantize a model after training",
    ),
    "rare type": (
        lambda: plan(0.5, net=with_buffer(torch.ones(2).to(torch.float8_e4m3fnuz))),
        "more is torch.float8_e4m3fnuz, which cannot be sent",
    ),
    "sparse buffer": (
        lambda: plan(0.5, net=with_buffer(torch.eye(2).to_sparse())),
        r"more is sparse_coo, which cannot be sent; make it dense with to_dense\(\)",
    ),
    "NaN to factorize": (lambda: factorize(spoiled("1.weight", NAN), 0.5), "layer 1: the matrix has NaN or Inf"),
    "Inf to factorize": (lambda: factorize(spoiled("6.weight", INF), 0.5), "layer 6: the matrix has NaN or Inf"),
    "NaN matrix": (lambda: decompose({"a": torch.full((2, 2), NAN)}), "layer a: its weight has NaN or Inf"),
    "whole numbers": (
        lambda: decompose({"a": torch.ones(2, 2, dtype=torch.long)}),
        "layer a: its weight is torch.int64",
    ),
    "complex": (lambda: decompose({"a": torch.ones(2, 2) + 1j}), "layer a: its weight is torch.complex64"),
    "no matrix": (lambda: decompose({"a": torch.ones(2)}), r"of shape \(2,\); a matrix of real"),
    "clip": (lambda: clip_factors([], NAN), "clip is nan"),
    "low clip": (lambda: clip_factors([], 0.9), "clip is 0.9"),
    **{
        f"{strategy}, {budget}": (
            lambda s=strategy, b=budget: plan(b, s),
            f"client 'phone': keep ratio {shown(budget)} is",
        )
        for strategy in ("collective", "dense", "full")
        for budget in (0, -1, NAN, INF, 1.1, "0.5", None)
    },
    "strategy": (lambda: ShardPlanner(["top_n"]), r"unknown strategy \['top_n'\]"),
    "long strategy": (lambda: ShardPlanner("x" * 100_000), "unknown strategy 'xxx"),
    "nothing": (lambda: pick({"a": 1}, None, "thing"), "unknown thing None"),
    "terms": (lambda: collective_inclusion(ONES, NAN, 2), "num_terms is nan"),
    "endless terms": (lambda: collective_inclusion(ONES, INF, 2), "num_terms is inf"),
    "broken terms": (lambda: collective_inclusion(ONES, 1.5, 2), "num_terms is 1.5"),
    "words for terms": (lambda: collective_inclusion(ONES, "2", 2), "num_terms is '2'"),
    "clients": (lambda: collective_inclusion(ONES, 2, NAN), "num_clients is nan"),
    "no clients": (lambda: collective_inclusion(ONES, 2, 0), "num_clients is 0"),
    "complex magnitudes": (lambda: collective_inclusion(ONES + 1j, 2, 2), "magnitudes has complex values"),
    "complex weights": (lambda: successive_inclusion(ONES + 1j, 2), "has complex values"),
    "negative": (lambda: optimal_inclusion(-ONES, 2), r"magnitudes\[0\] is -1.0"),
    "budget": (lambda: optimal_inclusion(ONES, NAN), "budget is nan"),
    "costs": (lambda: optimal_inclusion(np.ones(500), 2, -np.ones(500)), "costs must be 500 finite numbers above 0"),
    "seed for rng": (lambda: draw_terms(HALVES, rng=42), "draw_terms needs a generator, not 42"),
    "no size": (lambda: draw_terms(HALVES, rng=RNG, size=0), "size is 0"),
    "negative size": (lambda: draw_terms(HALVES, rng=RNG, size=-1), "size is -1"),
    "broken size": (lambda: draw_terms(HALVES, rng=RNG, size=1.5), "size is 1.5"),
    "NaN inclusion": (lambda: draw_terms([NAN, 0.5], rng=RNG), r"inclusion\[0\] is nan"),
    "inclusion's sum": (lambda: draw_terms([0.5, 0.4], rng=RNG), "inclusion sums to 0.9"),
    "count": (lambda: sampler(num_clients=2.5), "clients.count is 2.5"),
    "NaN count": (lambda: sampler(num_clients=NAN), "clients.count is nan"),
    "per round": (lambda: sampler(per_round="2"), "clients.per_round is '2'"),
    "far too many": (lambda: sampler(per_round=10**30), "clients.per_round is 1000000000"),
    "words for a budget": (lambda: optimal_inclusion(ONES, "2"), "budget is '2'"),
    "a list for a band": (lambda: round_time([1.0], [1.0], [1.0]), r"bandwidth is \[1.0\]"),
    "a mapping for norms": (lambda: mmfl_probabilities({}, 1), "norms is {}; real numbers are needed"),
    "true for a budget": (lambda: sampler("ocs", budget=True), "clients.budget is True"),
    "too many": (lambda: sampler(per_round=5), "clients.per_round is 5"),
    "NaN budget": (lambda: sampler("ocs", budget=NAN), "clients.budget is nan"),
    "beta": (lambda: sampler("wireless", beta_over_alpha=NAN), "clients.beta_over_alpha is nan"),
    "endless beta": (lambda: sampler("wireless", beta_over_alpha=INF), "clients.beta_over_alpha is inf"),
    "signal": (lambda: sampler("mmfl", budget=1, signal="noise"), "clients.signal is 'noise'"),
    "fewer sizes": (lambda: sampler(population=population(ONES[:3])), "not one of 4 clients"),
    "fewer ratios": (lambda: sampler(population=population(ratios=ONES[:3])), "not one of 4 clients"),
    "fewer times": (
        lambda: sampler(population=population(profiles=Profiles(ONES[:3], ONES[:3], 1.0))),
        "not one of 4 clients",
    ),
    "NaN sizes": (lambda: sampler(population=population(ONES * NAN)), "num_samples of the population must be finite"),
    "negative sizes": (lambda: sampler(population=population(-ONES)), "num_samples of the population must be finite"),
    "no sizes": (lambda: sampler(population=population(0 * ONES)), "not all 0"),
    "ratios": (
        lambda: sampler(population=population(ratios=0 * ONES)),
        "costs of the population must be finite and above 0",
    ),
    "band": (lambda: round_time([1.0], [1.0], 1e-320), "bandwidth is 1e-320"),
    "no band": (lambda: round_time([1.0], [1.0], 0), "bandwidth is 0"),
    "times": (lambda: round_time([NAN], [1.0], 1), r"compute\[0\] is nan"),
    "norms": (lambda: mmfl_probabilities([[1.0, NAN]], 1), r"norms\[0, 1\] is nan"),
    "shape of norms": (lambda: mmfl_probabilities([1.0], 1), "norms has shape"),
}


@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2100


def test_a_message_is_one_line_whatever_it_quotes():
    assert str(UserError("a\nb\0c\x1b[31m")) == "a b\\x00c\\x1b[31m"
    long = str(UserError("x" * 5000 + "; do this instead"))
    assert len(long) < 2010
    assert long.endswith("; do this instead")
    assert len(shown("x" * 100_000)) < 100
    assert len(shown(np.arange(1000.0))) < 100


def test_why_a_client_failed_is_one_printable_line():
    failure = Failure(Kind.FAILED, "x\nERROR the disk is full\x1b[2J" + "y" * 5000)
    assert str(failure).startswith("x ERROR the disk is full?[2Jyyy")
    assert len(str(failure)) == 500
