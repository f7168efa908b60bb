"""Differential privacy of clients: sensitivity, noise, what the plan tells, the account, and an attack."""

from dataclasses import replace
from math import erf, exp, inf, nan, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sharding import Gaussian, Server, ShardPlanner, Update, UserError, factorize, train_shard
from sharding.client_sampling import PoissonSampler, UniformSampler
from sharding.recipes import published, tuned
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.privacy.accountant import epsilon, noise_for, rounds_within
from sharding.rounds.privacy.average import PrivateAverage
from tests.sharding.models import make_net, perturbed, unchanged

POPULATION = {client: (0.25, 0.5, 1.0)[client % 3] for client in range(12)}
ATTACKS = {  # values of the parts of an update in the place of what was sent
    "huge": lambda part: torch.full_like(part, 3e38),
    "huge with signs": lambda part: torch.where(torch.arange(part.numel()).view(part.shape) % 2 == 0, 3e38, -3e38),
    "sparse": lambda part: part + (torch.arange(part.numel()).view(part.shape) == 0) * 1e6,
    "small": lambda part: part + 1e-4,
    "NaN": lambda part: part * nan,
    "infinite": lambda part: part + inf,
}


def gaussian(**options):
    """The privacy of the population; others of its arguments by options."""
    usual = {"clipping_norm": 1.0, "noise_multiplier": 1.0, "keep_ratios": POPULATION, "per_round": 4.0, "seed": 7}
    return Gaussian(**usual | options)


def make_server(strategy="top_n", noise=1.0, bound=1.0, compression="float32", **options):
    privacy = gaussian(clipping_norm=bound, noise_multiplier=noise, **options)
    return Server(make_net(), ShardPlanner(strategy, compression=compression), privacy=privacy)


def plan_of(server, cohort, round=0):
    return server.plan({client: POPULATION[client] for client in cohort}, round)


def attacked(shard, attack):
    """An update with hostile values in every part."""
    return shard.returned({name: ATTACKS[attack](part) for name, part in shard.trained().items()})


def released(average):
    """What a round makes public of its sums: their means with noise, by name."""
    names, seen = list(average.sums), {}
    noisy = average._noisy
    average._noisy = lambda name, digest: seen.setdefault(name, noisy(name, digest)).clone()
    average.finish()
    return {name: seen[name] / average._privacy.per_round for name in names}


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@settings(deadline=None, max_examples=25)
@given(
    strategy=st.sampled_from(["top_n", "collective", "unbiased", "prism", "full", "dense"]),
    compression=st.sampled_from(["float32", "int8", "bfloat16"]),
    cohort=st.sets(st.integers(0, 11), max_size=5),
    one=st.integers(0, 11),
    attack=st.sampled_from([*ATTACKS]),
    bound=st.sampled_from([0.01, 1.0, 50.0]),
)
def test_sums_with_and_without_one_client_differ_by_at_most_the_clipping_norm(
    strategy, compression, cohort, one, attack, bound
):
    sums = []
    for clients in (sorted(cohort - {one}), sorted(cohort | {one})):
        server = make_server(strategy, bound=bound, compression=compression)
        plan = plan_of(server, clients)
        average = server.average(plan)
        for client, shard in plan.shards():
            average.add(client, attacked(shard, attack) if client == one else perturbed(shard, client))
        sums.append(average.sums)
    without, with_one = sums
    assert without.keys() == with_one.keys()
    difference = (flat(with_one) - flat(without)).double() * average.unit
    assert float(difference.norm()) <= bound * (1 + 1e-12)


@pytest.mark.parametrize("strategy", ["top_n", "collective", "unbiased", "prism", "top_n_scaled", "dense"])
def test_plan_without_a_client_has_the_same_terms_chances_and_draws_of_the_others(strategy):
    server = make_server(strategy)
    plans = [plan_of(server, cohort) for cohort in ([], [1], [0, 1, 2, 3, 4, 5])]
    for plan in plans:
        assert plan.id == plans[0].id
        assert plan.spectra.keys() == plans[0].spectra.keys()
        for name, spectrum in plan.spectra.items():
            assert torch.equal(spectrum.indices, plans[0].spectra[name].indices)
            assert torch.equal(spectrum.u, plans[0].spectra[name].u)
        for key, draw in plan.draws.items():
            np.testing.assert_array_equal(draw.allocation.inclusion, plans[0].draws[key].allocation.inclusion)
    few, many = (plan.shard(1) for plan in plans[1:])
    assert few.to_bytes() == many.to_bytes()


def test_each_coordinate_of_each_sum_has_noise_of_the_configured_deviation():
    server = make_server("collective", noise=0.7, bound=3.0)
    squares, count = 0.0, 0
    for round in range(30):
        noise = flat(released(server.average(plan_of(server, [], round)))) * 4.0 / (0.7 * 3.0)
        squares, count = squares + float(noise.square().sum()), count + len(noise)
    assert abs(squares - count) < 5 * sqrt(2 * count)  # of chi-square, whose deviation is √(2n)


def test_the_model_moves_by_the_noisy_mean_and_no_further_than_the_terms_of_the_plan():
    server = make_server("dense", noise=2.0)
    before = {name: part.clone() for name, part in server.model.state_dict().items()}
    plan = plan_of(server, [3, 4])
    averages = [server.average(plan) for _ in range(2)]
    for client, shard in plan.shards():
        for average in averages:
            average.add(client, perturbed(shard, client))
    noisy = released(averages[0])
    server.step(averages[1])
    for name, part in server.model.state_dict().items():
        torch.testing.assert_close(part, before[name] + noisy[name].float())
    assert {name: tuple(part.shape) for name, part in noisy.items()} == {n: tuple(p.shape) for n, p in before.items()}


def test_terms_that_nobody_could_hold_stay_and_those_that_nobody_drew_get_noise():
    server = make_server("top_n", keep_ratios=dict.fromkeys(range(12), 0.25))
    weight = server.model[6].weight.detach().clone()  # a linear layer of 10 × 128 with 3 of 10 terms
    server.step(server.average(server.plan({}, 0)))
    moved = server.model[6].weight.detach() - weight
    assert 0 < int(torch.linalg.matrix_rank(moved.double(), rtol=1e-5)) <= 6


@pytest.mark.parametrize("strategy", ["top_n", "collective"])
def test_a_client_is_sent_the_noisy_model_of_the_round_before(strategy):
    models = []
    for noise in (0.0, 1.0):
        server = make_server(strategy, noise)
        server.round(0, {3: 0.25, 4: 0.5}, lambda _, shard: unchanged(shard))
        models.append(server.model.state_dict())
        sent = plan_of(server, [5], round=1).shard(5).whole
        assert all(torch.equal(part, models[-1][name]) for name, part in sent.items())
    assert not any(torch.equal(part, models[1][name]) for name, part in models[0].items())


def test_a_round_again_gives_the_same_bits_and_with_other_updates_other_noise():
    def round_with(seed, secret=7):
        server = make_server("top_n", bound=1e-3, seed=secret)
        plan = plan_of(server, [3])
        average = server.average(plan)
        average.add(3, perturbed(plan.shard(3), seed))
        return flat(released(average))

    first = round_with(1)
    assert torch.equal(first, round_with(1))
    assert not torch.equal(first, round_with(1, secret=8))
    difference = (round_with(2) - first) * 4.0 / 1e-3  # if the noise were that of the round: at most 2
    assert float(difference.norm()) == pytest.approx(sqrt(2 * len(first)), rel=0.2)


def through_the_wire(update):
    return Update.from_bytes(update.to_bytes())


@pytest.mark.parametrize("compression", ["float32", "int8"])
def test_a_round_gives_the_same_bits_after_the_wire_in_any_order_and_layout(compression):
    torch.manual_seed(0)
    net, clients = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6))), dict.fromkeys(range(8), 0.2)
    privacy = gaussian(clipping_norm=0.01, keep_ratios=clients)
    server = Server(net, ShardPlanner("top_n", compression=compression), privacy=privacy)
    plan = server.plan(clients, 0)
    updates = {client: through_the_wire(perturbed(shard, client)) for client, shard in plan.shards()}

    def transposed(update):
        whole = {name: part.mT.contiguous().mT if part.dim() == 2 else part for name, part in update.whole.items()}
        return replace(update, whole=dict(reversed(whole.items())))

    def outcome(changed, order):
        average = server.average(plan)
        for client in order:
            average.add(client, changed(updates[client]))
        delta, outcome = average.finish()
        return outcome.release, {name: part.tolist() for name, part in delta.items()}

    first = outcome(lambda update: update, clients)
    assert first[0]
    for _ in range(4):  # another order of names at each reading
        assert outcome(through_the_wire, clients) == first
    assert outcome(transposed, reversed(clients)) == first
    assert outcome(lambda update: update, list(clients)[1:])[0] != first[0]


def test_clients_that_fail_count_as_zero_and_the_rest_alike():
    server = make_server("top_n", bound=1e9)
    plan = plan_of(server, [0, 1, 2])
    average = server.average(plan)
    updates = {client: perturbed(shard, client) for client, shard in plan.shards()}
    average.add(0, updates[0])
    average.add(1, attacked(plan.shard(1), "NaN"))
    average.add(2, Failure(Kind.FAILED, "no battery"))
    name = "0.weight"
    change = updates[0].whole[name].double() - plan.whole[name].double()
    torch.testing.assert_close(average.sums[name].double() * average.unit, change)
    assert average.finish()[1].accepted == [0]


def test_an_update_in_float64_is_left_as_it_is():
    server = Server(make_net().double(), ShardPlanner("top_n"), privacy=gaussian())
    updates, copies = [], []

    def train(client, shard):
        updates.append(attacked(shard, "small"))
        copies.append({name: part.clone() for name, part in updates[-1].trained().items()})
        return updates[-1]

    server.round(0, {0: 0.25}, train)
    assert any(part.dtype == torch.float64 for part in copies[0].values())
    assert all(torch.equal(part, copies[0][name]) for name, part in updates[0].trained().items())


def test_buffers_are_neither_released_nor_part_of_the_norm():
    model = make_net()
    model.register_buffer("mask", torch.ones(3))
    server = Server(model, ShardPlanner("top_n"), privacy=gaussian())
    server.round(0, {3: 0.25}, lambda _, shard: perturbed(shard, 1))
    assert torch.equal(server.model.mask, torch.ones(3))


def test_what_is_frozen_stays_and_factors_get_noise():
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    model[2].weight.requires_grad_(False)
    small = factorize(model, 0.5, residual_format="int8")
    before = {name: part.clone() for name, part in small.state_dict().items()}
    server = Server(small, ShardPlanner("top_n"), privacy=gaussian(keep_ratios=dict.fromkeys(range(9), 0.5)))
    server.round(0, {3: 0.5}, lambda _, shard: unchanged(shard))
    moved = {name for name, part in small.state_dict().items() if not torch.equal(part, before[name])}
    assert moved == {"0.weight", "3.weight", "1.u", "1.v", *(f"{layer}.bias" for layer in range(4))}


def test_a_model_trains_under_privacy_with_as_many_clients_as_that_needs():
    torch.manual_seed(0)
    clients = dict.fromkeys(range(4000), 0.5)
    privacy = Gaussian(clipping_norm=0.5, noise_multiplier=1.0, keep_ratios=clients, per_round=40, seed=1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    server = Server(model, ShardPlanner("top_n"), privacy=privacy)
    sampler, inputs = PoissonSampler(4000, 40, seed=2), torch.randn(4000, 8, 4)
    targets = (inputs.sum(2) > 0).long()
    for t in range(8):
        cohort = {client: clients[client] for client in sampler.cohort(t)}
        server.round(t, cohort, lambda c, s: train_shard(model, s, [(inputs[c], targets[c])] * 2, 0.2))
    assert float((server.model(inputs).argmax(2) == targets).float().mean()) > 0.9
    assert privacy.epsilon(8, 1e-5) < 1.5


def test_epsilon_is_that_of_the_library_on_the_same_events():
    import dp_accounting  # which takes most of a second
    from dp_accounting.rdp import RdpAccountant

    relations = dp_accounting.NeighboringRelation
    poisson = RdpAccountant(neighboring_relation=relations.ADD_OR_REMOVE_ONE)
    poisson.compose(dp_accounting.PoissonSampledDpEvent(0.04, dp_accounting.GaussianDpEvent(1.1)), 7)
    assert epsilon(1.1, 100, 4.0, 7, 1e-5) == poisson.get_epsilon(1e-5)
    fixed = RdpAccountant(neighboring_relation=relations.REPLACE_ONE)  # 2C apart, so z counts half
    fixed.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 4, dp_accounting.GaussianDpEvent(0.55)), 7)
    assert epsilon(1.1, 100, 4, 7, 1e-5, "fixed") == fixed.get_epsilon(1e-5)


def test_epsilon_of_every_client_in_every_round_is_that_of_the_gaussian_mechanism():
    exact = epsilon(2.0, 50, 50, 3, 1e-5)
    deviation = 2.0 / sqrt(3)
    tail = [(1 + erf((sign / (2 * deviation) - exact * deviation) / sqrt(2))) / 2 for sign in (1, -1)]
    assert tail[0] - exp(exact) * tail[1] == pytest.approx(1e-5)  # Balle & Wang 2018, Theorem 8
    assert epsilon(4.0, 50, 50, 3, 1e-5, "fixed") == exact
    assert epsilon(2.0, 50, 50, 0, 1e-5) == 0
    assert epsilon(0.0, 50, 5, 3, 1e-5) == inf


def test_rounds_within_a_budget_are_the_most_that_keep_it():
    allowed = rounds_within(2.0, 1.0, 1000, 20.0, 500, 1e-5)
    assert epsilon(1.0, 1000, 20.0, allowed, 1e-5) <= 2.0 < epsilon(1.0, 1000, 20.0, allowed + 1, 1e-5)
    assert rounds_within(100.0, 1.0, 1000, 20.0, 50, 1e-5) == 50
    assert rounds_within(0.01, 1.0, 1000, 20.0, 50, 1e-5) == 0


def test_noise_for_a_budget_is_the_least_that_keeps_it():
    setting = (1000, 20, 5, 1e-5)
    noise = noise_for(0.5, *setting)
    assert epsilon(noise, *setting) <= 0.5 < epsilon(0.999 * noise, *setting)


@settings(deadline=None, max_examples=30)
@given(
    noise=st.floats(1e-6, 1e6),
    num_clients=st.integers(1, 2000),
    share=st.floats(1e-9, 1),
    rounds=st.integers(1, 10**9),
    sampling=st.sampled_from(["poisson", "fixed"]),
)
def test_no_draw_of_clients_spends_more_than_none(noise, num_clients, share, rounds, sampling):
    per_round = max(1, int(share * num_clients)) if sampling == "fixed" else share * num_clients
    spent = epsilon(noise, num_clients, per_round, rounds, 1e-5, sampling)
    assert 0 <= spent <= epsilon(noise, num_clients, num_clients, rounds, 1e-5, sampling) < inf


@pytest.mark.parametrize("sampling", ["poisson", pytest.param("fixed", marks=pytest.mark.slow)])
def test_budgets_of_any_size_end(sampling, caplog):
    setting = (1000, 20, 5, 1e-9, sampling)
    assert epsilon(noise_for(1e300, *setting), *setting) < inf
    assert not caplog.text
    assert epsilon(noise_for(0.001, *setting), *setting) <= 0.001
    assert "max_epsilon=0.001 is below what the accountant can reach for a draw of clients" in caplog.text
    with pytest.raises(UserError, match=r"max_epsilon is 1e-09, and with a noise multiplier of 1e\+06"):
        noise_for(1e-9, *setting)


WRONG = [None, "1", True, nan, inf, -inf, -1, [1.0], torch.tensor(1.0), 10**400]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["noise_multiplier", "num_clients", "per_round", "rounds", "delta", "max_epsilon"])
def test_arguments_of_the_account_that_are_no_number_in_range_are_refused(name, wrong):
    right = {"num_clients": 100, "per_round": 5, "rounds": 3, "delta": 1e-5}
    budget = {"max_epsilon": 1.0}
    for function, arguments in (
        (epsilon, {"noise_multiplier": 1.0} | right),
        (rounds_within, {"noise_multiplier": 1.0} | budget | right),
        (noise_for, budget | right),
    ):
        if name in arguments:
            with pytest.raises(UserError, match=f"{name} is "):
                function(**arguments | {name: wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampling": "uniform"}, "sampling is 'uniform'"),
        ({"sampling": ["fixed"]}, "sampling is"),
        ({"sampling": "fixed", "per_round": 2.9}, "a whole number"),
        ({"per_round": 101}, "per_round is 101"),
        ({"per_round": 0}, "per_round is 0"),
        ({"rounds": 2.5}, "rounds is 2.5"),
        ({"noise_multiplier": 1e-7}, "noise_multiplier is 1e-07"),
    ],
)
def test_draws_without_an_account_are_refused(wrong, message):
    right = {"noise_multiplier": 1.0, "num_clients": 100, "per_round": 5, "rounds": 3, "delta": 1e-5}
    with pytest.raises(UserError, match=message):
        epsilon(**right | wrong)


@pytest.mark.parametrize("seed", [None, "", "abc", 1.5, True, -1, [1], torch.tensor(3)], ids=repr)
def test_seed_that_is_no_whole_number_is_refused_wherever_one_is_taken(seed):
    net = make_net()
    for takes in (
        lambda: make_server(seed=seed),
        lambda: PoissonSampler(50, 5, seed=seed),
        lambda: UniformSampler(50, 5, seed=seed),
        lambda: ShardPlanner(seed=seed),
        lambda: published(net, seed=seed),
        lambda: tuned(net, {0: 0.5}, seed=seed),
    ):
        with pytest.raises(UserError, match=r"seed is .*; a whole number of at least 0 is needed"):
            takes()


@pytest.mark.parametrize("round", [None, "0", 0.5, True, -1, torch.tensor(0)], ids=repr)
def test_round_that_is_no_whole_number_is_refused(round):
    for takes in (
        lambda: make_server().round(round, {3: 0.25}, lambda _, shard: unchanged(shard)),
        lambda: make_server().plan({3: 0.25}, round),
        lambda: PoissonSampler(50, 5, seed=0).cohort(round),
    ):
        with pytest.raises(UserError, match=r"round is .*; a whole number of at least 0 is needed"):
            takes()


def advantage(noise: float, trials: int = 400) -> float:
    """How much more often the likelihood ratio calls a client present where it was than where it was not."""
    server = make_server("top_n", noise, per_round=12.0)
    plan, calls, names = plan_of(server, [3]), [], [name for name, _ in server.model.named_parameters()]
    known = server.average(plan)
    known.add(3, perturbed(plan.shard(3), 5))
    direction = flat(known.sums).double() * known.unit  # the attacker knows the client's data
    for present in (True, False):
        votes = 0
        for trial in range(trials):
            privacy = gaussian(noise_multiplier=noise, per_round=12.0, seed=trial)
            average = PrivateAverage(plan, privacy, names)
            if present:
                average.add(3, perturbed(plan.shard(3), 5))
            digest = average._digest()
            seen = flat({name: average._noisy(name, digest) for name in list(average.sums)})
            votes += float(seen @ direction) > 0.5  # is p(seen | present) the larger one?
        calls.append(votes / trials)
    return calls[0] - calls[1]


def test_membership_of_a_client_shows_without_noise_and_stays_within_the_bound_with_it():
    assert advantage(0.0, trials=5) == 1.0
    measured, exact = advantage(4.0), erf(1 / (2 * 4.0) / sqrt(2))  # Φ(1/2z) − Φ(−1/2z)
    assert measured == pytest.approx(exact, abs=0.12)
    deltas = np.geomspace(1e-3, 0.5, 30)
    spent = np.array([epsilon(4.0, 12, 12.0, 1, delta) for delta in deltas])
    bound = ((np.exp(spent) - 1 + 2 * deltas) / (np.exp(spent) + 1)).min()
    assert measured < bound < 0.6


def test_what_is_not_private_is_refused():
    server = make_server()
    with pytest.raises(UserError, match="all clients count alike"):
        Server(make_net(), ShardPlanner(), max_share=0.5, privacy=server.privacy)
    with pytest.raises(UserError, match="all clients count alike"):
        server.round(0, {3: 0.25}, lambda _, shard: unchanged(shard), {3: 5})
    with pytest.raises(UserError, match="all clients count alike"):
        server.average_as_reported(plan_of(server, [3]))
    with pytest.raises(UserError, match="lack 99"):
        server.plan({99: 0.25}, 0)
    with pytest.raises(UserError, match="lack 3"):
        server.plan({3: 0.5}, 0)
    with pytest.raises(UserError, match=r"running statistics.*1\.running_mean"):
        Server(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ShardPlanner("dense"), privacy=server.privacy)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clipping_norm": 0}, "clipping_norm is 0"),
        ({"noise_multiplier": -1}, "noise_multiplier is -1"),
        ({"noise_multiplier": nan}, "noise_multiplier is nan"),
        ({"per_round": 13}, "per_round is 13"),
        ({"per_round": 2.5, "sampling": "fixed"}, "a whole number"),
        ({"sampling": "poison"}, "sampling is 'poison'"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        gaussian(**wrong)


def test_seeds_are_random_and_not_shown():
    first, second = (make_server(seed=Gaussian.__dataclass_fields__["seed"].default_factory()).privacy for _ in "ab")
    assert first.seed != second.seed
    assert str(first.seed) not in repr(first)


def test_poisson_invites_each_client_by_its_own_coin():
    sampler = PoissonSampler(200, 20, seed=3)
    cohorts = [sampler.cohort(round) for round in range(400)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.mean() == pytest.approx(20, abs=5 * sqrt(18 / 400))
    assert sizes.var() == pytest.approx(18, rel=0.4)
    held = np.bincount(np.concatenate(cohorts), minlength=200)
    assert held.min() > 0
    assert cohorts == [PoissonSampler(200, 20, seed=3).cohort(round) for round in range(400)]
