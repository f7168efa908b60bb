"""Invalid arguments of the library: one `UserError` line that names the value."""

from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn

from sharding import (
    SAMPLERS,
    Budget,
    Energy,
    FactorizedConv,
    FactorizedLinear,
    FedYogi,
    Population,
    ShardPlanner,
    UserError,
    client_model,
    clip_and_decay,
    collective_inclusion,
    draw_terms,
    factorize,
    optimal_inclusion,
    shardable_layers,
    successive_inclusion,
    train_shard,
)
from sharding.client_sampling import (
    Profiles,
    aocs_probabilities,
    estimate_beta_over_alpha,
    mmfl_probabilities,
    plain_sum,
    round_time,
    wireless_probabilities,
)
from sharding.errors import lookup, safe_repr
from sharding.matrices.spectrum import decompose
from sharding.rounds.failures import Failure, Kind
from sharding.terms.designs import fit
from sharding.terms.inclusion import schatten_inclusion
from tests.sharding.models import make_net

NAN, INF = float("nan"), float("inf")
RNG = np.random.default_rng(0)
ONES = np.ones(4)
HALVES = [0.5, 0.5]


def corrupted(name: str, value: float) -> nn.Module:
    """The net with a NaN or Inf in one of its tensors."""
    net = make_net()
    with torch.no_grad():
        net.state_dict(keep_vars=True)[name].view(-1)[0] = value
    return net


def with_lock() -> nn.Module:
    net = make_net()
    net.lock = Lock()
    return net


def plan(budget, strategy="collective", net=None):
    return ShardPlanner(strategy).plan(net or make_net(), {"phone": budget})


def sampler(name="uniform", num_clients=4, per_round=2, population=None, **options):
    return SAMPLERS[name](num_clients, per_round, 0, population, **options)


def population(sizes=ONES, ratios=ONES, profiles=None):
    return Population(np.asarray(sizes), np.asarray(ratios), profiles)


def vectors(weights=HALVES, norms=HALVES, times=HALVES, ratio=0.0, cohort=1):
    return wireless_probabilities(weights, norms, times, ratio, cohort)


MODELS = [
    (lambda: plan(0.5, net=corrupted("1.weight", NAN)), "layer 1: its weight has NaN or Inf"),
    (lambda: plan(0.5, net=corrupted("1.bias", NAN)), "1.bias has NaN or Inf; did training diverge"),
    (lambda: factorize(corrupted("1.weight", NAN), 0.5), "layer 1: the matrix has NaN or Inf"),
    (lambda: decompose({"a": torch.ones(2, 2, dtype=torch.long)}), "layer a: its weight is torch.int64"),
    (lambda: decompose({"a": torch.ones(2, 2) + 1j}), "layer a: its weight is torch.complex64"),
    (lambda: decompose({"a": torch.ones(2)}), r"of shape \(2,\); a matrix of real"),
    *(
        (
            lambda n=n: FactorizedLinear.from_dense(nn.Linear(7, 3), n),
            f"num_terms is {n}, but a matrix of 3×7 has 1 to 3 terms",
        )
        for n in (0, 4, -1)
    ),
    (lambda: FactorizedLinear.from_dense(nn.Conv2d(4, 4, 1), 1), r"from an nn\.Linear, not a Conv2d"),
    (lambda: FactorizedConv.from_dense(nn.Linear(4, 4), 1), r"from an nn\.Conv1d or Conv2d or Conv3d, not a Linear"),
    (lambda: shardable_layers(make_net(), ["0", None]), "None is not a pattern"),
    (lambda: shardable_layers(make_net(), nn.Conv3d), "matches no layer"),
    (lambda: shardable_layers(make_net(), [""]), "skip pattern '' matches no layer"),
    (lambda: shardable_layers(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ["1"]), "skip pattern '1' matches no layer"),
    *((lambda r=r: factorize(make_net(), r), f"keep ratio {r} is outside") for r in (0, -0.1, 1.01, NAN)),
    *(
        (
            lambda part=part: factorize(make_net(), {"0": part}),
            rf"keep ratio {type(part).__name__}\(.*\) is of type {type(part).__name__}, not a number in",
        )
        for part in (Energy(0.9), Budget(800))
    ),
    *((lambda e=e: Energy(e), f"energy {e!r} is outside") for e in (1.5, "x", NAN)),
    (lambda: Budget(parameters="800"), "a Budget of '800' is not a number"),
    *(
        (lambda b=budget: plan(b), f"client 'phone': keep ratio {safe_repr(budget)} is")
        for budget in (0, -1, NAN, INF, 1.1, "0.5", None)
    ),
    *(
        (lambda f=f: factorize(make_net(), 0.5, residual_format=f), f"residual_format is {f!r}; it is one of int4, ")
        for f in ("int3", 4, True)
    ),
    (
        lambda: client_model(with_lock(), plan(0.5).shard("phone")),
        "this Sequential cannot be copied: cannot pickle '_thread.lock'",
    ),
    (lambda: ShardPlanner("uniased"), r"unknown strategy 'uniased' \(did you mean 'unbiased'\?\); choose one of: "),
    (lambda: ShardPlanner("x" * 100_000), "unknown strategy 'xxx"),
    (lambda: ShardPlanner("unbiased", "brewr"), "unknown design 'brewr' .*'brewer'"),
    (lambda: ShardPlanner(compression="int16"), "unknown compression 'int16'.*choose one of: bfloat16, float32, int8"),
    (lambda: lookup({"a": 1}, None, "thing"), "unknown thing None"),
    (lambda: clip_and_decay(make_net(), NAN), "clip is nan"),
    (lambda: clip_and_decay(make_net(), 0.9), "clip is 0.9"),
    (lambda: clip_and_decay(make_net(), decay_of="efective"), "decay_of is 'efective'"),
    (lambda: clip_and_decay(make_net(), decay=-1.0), "decay is -1.0"),
    (lambda: train_shard(make_net(), plan(0.5).shard("phone"), [], NAN), "lr is nan"),
    (lambda: FedYogi(make_net().parameters(), lr=0.0), "choose lr and tau above 0"),
    (lambda: FedYogi(make_net().parameters(), betas=(0.9, 1.0)), r"betas in \[0, 1\)"),
]
INCLUSION = [
    (lambda: optimal_inclusion(-ONES, 2), r"magnitudes\[0\] is -1.0"),
    (lambda: optimal_inclusion([1.0, NAN], 1), r"magnitudes\[1\] is nan"),
    (lambda: optimal_inclusion([], 1), "non-empty"),
    (lambda: optimal_inclusion([[1.0]], 1), "shape"),
    (lambda: optimal_inclusion(ONES, 0), "budget is 0"),
    (lambda: optimal_inclusion(ONES, 4.5), "budget is 4.5"),
    (lambda: optimal_inclusion(ONES, "2"), "budget is '2'"),
    (lambda: optimal_inclusion(np.ones(500), 2, -np.ones(500)), "costs must be 500 finite numbers above 0"),
    (lambda: optimal_inclusion([1.0, 2.0], 1, [1.0, 0.0]), "costs must be 2"),
    (lambda: collective_inclusion(ONES, 0, 2), "num_terms is 0"),
    (lambda: collective_inclusion(ONES, 5, 2), "num_terms is 5"),
    (lambda: collective_inclusion(ONES, 1.5, 2), "num_terms is 1.5"),
    (lambda: collective_inclusion(ONES, "2", 2), "num_terms is '2'"),
    (lambda: collective_inclusion(ONES, 2, 0), "num_clients is 0"),
    (lambda: collective_inclusion(ONES + 1j, 2, 2), "magnitudes has complex values"),
    (lambda: successive_inclusion([1.0, 0.0, 1.0], 3), "only 2 weights are positive"),
    (lambda: successive_inclusion([1.0, 1.0], 3), "num_terms is 3"),
    *((lambda p=p: schatten_inclusion([1.0, 2.0], 1, p), f"p is {p}") for p in (1.9, 8.1, NAN)),
    (lambda: fit([0.5, 1.5]), r"inclusion\[1\] is 1.5"),
    (lambda: fit([NAN, 1.0]), r"inclusion\[0\] is nan"),
    (lambda: fit([0.5, 0.4]), "inclusion sums to 0.9"),
    (lambda: fit([0.5, 0.500002]), "sums to 1.000002"),
    (lambda: fit([0.0, 0.0]), "sums to 0"),
    (lambda: fit([]), "non-empty"),
    (lambda: draw_terms(HALVES, "brewr", rng=RNG), "did you mean 'brewer'"),
    (lambda: draw_terms(HALVES, rng=RNG, size=0), "size is 0"),
]
CLIENTS = [
    (lambda: sampler(num_clients=2.5), "num_clients is 2.5"),
    (lambda: sampler(per_round="2"), "per_round is '2'"),
    (lambda: sampler(per_round=5), "per_round is 5"),
    (lambda: sampler("ocs", budget=None), "budget is None; the expected number of uploads is needed"),
    (lambda: sampler("ocs", budget=True), "budget is True"),
    (lambda: sampler("ocs", budget=6), "budget is 6; .* at most per_round=2"),
    (lambda: sampler("wireless", population=population()), "needs the clients' speeds"),
    (lambda: sampler("wireless"), "needs the clients' speeds"),
    (lambda: sampler("wireless", beta_over_alpha=NAN), "beta_over_alpha is nan"),
    (lambda: sampler("wireless", beta_over_alpha=-1.0), "beta_over_alpha is -1.0; a finite number from 0"),
    (lambda: sampler("mmfl", budget=1, signal="noise"), "signal is 'noise'; choose one of: norm, loss"),
    (lambda: sampler(population=population(ONES[:3])), "not one of 4 clients"),
    (lambda: sampler(population=population(profiles=Profiles(ONES[:3], ONES[:3], 1.0))), "not one of 4 clients"),
    (lambda: sampler(population=population(-ONES)), "num_samples of the population must be finite"),
    (lambda: sampler(population=population(0 * ONES)), "not all 0"),
    (lambda: sampler(population=population(ratios=0 * ONES)), "costs of the population must be finite and above 0"),
    (lambda: aocs_probabilities(ONES, 5, plain_sum), "budget is 5; .* at most 4"),
    (lambda: aocs_probabilities(ONES * NAN, 1, plain_sum), "NaN"),
    (lambda: aocs_probabilities(-ONES, 1, plain_sum), "negative"),
    (lambda: aocs_probabilities(ONES[:0], 1, plain_sum), "non-empty"),
    (lambda: mmfl_probabilities(np.ones((3, 2)), 4), "budget is 4"),
    (lambda: mmfl_probabilities(ONES, 1), "norms has shape .*one row per client"),
    (lambda: mmfl_probabilities(np.ones((3, 0)), 1), "one column per model"),
    (lambda: mmfl_probabilities([[1.0, NAN]], 1), r"magnitudes\[0\] is nan"),
    (lambda: mmfl_probabilities([[1.0], [-1.0]], 1), r"magnitudes\[1\] is -1"),
    (lambda: vectors(norms=[1, NAN]), r"gradient_norms\[1\] is nan"),
    (lambda: vectors(times=[1, 0]), r"times\[1\] is 0"),
    (lambda: vectors(times=[1]), "2, 2 and 1 entries"),
    (lambda: vectors(ratio=-1), "beta_over_alpha is -1"),
    (lambda: round_time([1.0], [1.0], [1.0]), r"bandwidth is \[1.0\]"),
    (lambda: round_time([1.0], [1.0], 1e-320), "bandwidth is 1e-320"),
    (lambda: round_time([1.0], [-1.0], 1), r"communicate\[0\] is -1"),
    (lambda: round_time([NAN], [1.0], 1), r"compute\[0\] is nan"),
    (lambda: round_time([1.0, 2.0], [1.0], 1), "compute and communicate have 2 and 1 entries"),
    (lambda: Profiles([1.0, 2.0], [1.0], 1), "compute and communicate have 2 and 1 entries"),
    (lambda: Profiles(ONES, -ONES, 1), r"communicate\[0\] is -1"),
    (lambda: Profiles(ONES, ONES, 0), "bandwidth is 0"),
    (lambda: estimate_beta_over_alpha(HALVES, ONES, [2], [1], 1), "weights and gradient_norms have 2 and 4 entries"),
    (lambda: estimate_beta_over_alpha(HALVES, HALVES, [2, 3], [1], 1), "rounds_uniform has 2 .* rounds_weighted has 1"),
]
CASES = [*MODELS, *INCLUSION, *CLIENTS]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_library_call_with_invalid_input_raises_with_the_reason(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_user_error_of_any_text_is_one_short_line():
    assert str(UserError("a\nb\0c\x1b[31m")) == "a b\\x00c\\x1b[31m"
    long = str(UserError("x" * 5000 + "; do this instead"))
    assert len(long) < 2010
    assert long.endswith("; do this instead")
    assert len(safe_repr("x" * 100_000)) < 100
    assert len(safe_repr(np.arange(1000.0))) < 100


def test_failure_of_any_text_is_one_printable_line():
    failure = Failure(Kind.FAILED, "x\nERROR the disk is full\x1b[2J" + "y" * 5000)
    assert str(failure).startswith("x ERROR the disk is full?[2Jyyy")
    assert len(str(failure)) == 500
