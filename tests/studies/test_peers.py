"""Peers in federated fine-tuning: each aggregation against its formula, and rounds against the library's."""

import pytest
import torch

from sharding import FactorizedLayer, Frozen, Shard
from studies import finetune
from studies.peers import aggregation
from studies.peers.federation import Federation
from studies.peers.servers import redraw_terms
from train.config.schema import load_config
from train.experiment.assembly import assemble
from train.rounds import run_rounds

TINY = [
    *("rounds=2", "evaluate_every=1", "model.width=8", "model.groups=4", "model.blocks=[1, 1]", "engine=sequential"),
    *("local.epochs=1", "local.decay=0", "server_optimizer=plain", "result=last"),
]
ON_INT4 = [*TINY, "residual=int4", "keep_ratio={0.2: 0.6, 0.4: 0.4}", "strategy=top_n"]
RANKS, WEIGHTS = (1, 3, 2), (0.2, 0.5, 0.3)


def updates(ranks=RANKS, rows=5, columns=7):
    random = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(size, n, generator=random, dtype=torch.float64) for size in (rows, columns)) for n in ranks
    ]


def product(factors):
    u, v = factors
    return u @ v.mT


def federation(name, overrides=ON_INT4):
    method = finetune.EXPERIMENTS["finetune_vision"].methods[name]
    return Federation.of(load_config("configs/quickstart.yaml", [*overrides, *words(method.overrides)]), method.make)


def words(overrides):
    return [f"{key}={value}" for key, value in overrides.items() if key != "keep_ratio"]


def test_fedit_averages_b_and_a_separately():
    of_rank_two = updates((2, 2, 2))
    b, a = ([factors[side] if side == 0 else factors[1].mT for factors in of_rank_two] for side in (0, 1))
    u, v = aggregation.fedit(of_rank_two, WEIGHTS)
    torch.testing.assert_close(u, WEIGHTS[0] * b[0] + WEIGHTS[1] * b[1] + WEIGHTS[2] * b[2])
    torch.testing.assert_close(v.mT, WEIGHTS[0] * a[0] + WEIGHTS[1] * a[1] + WEIGHTS[2] * a[2])


def test_hetlora_pads_with_zeros_and_weights_by_norms_of_products():
    norms = [float(product(factors).square().sum().sqrt()) for factors in updates()]
    expected_b, expected_a = (torch.zeros(5, 3, dtype=torch.float64), torch.zeros(3, 7, dtype=torch.float64))
    for (u, v), n, norm in zip(updates(), RANKS, norms, strict=True):
        for column in range(n):
            expected_b[:, column] += norm / sum(norms) * u[:, column]
            expected_a[column] += norm / sum(norms) * v[:, column]
    u, v = aggregation.hetlora(updates(), WEIGHTS)
    torch.testing.assert_close(u, expected_b)
    torch.testing.assert_close(v.mT, expected_a)


@pytest.mark.parametrize("ranks", [RANKS, (2, 4, 4)])
def test_flexlora_gives_each_rank_the_truncated_svd_of_the_averaged_product(ranks):
    mean = sum(weight * product(factors) for weight, factors in zip(WEIGHTS, updates(ranks), strict=True))
    left, magnitudes, right = torch.linalg.svd(mean, full_matrices=False)
    u, v = aggregation.flexlora(updates(ranks), WEIGHTS)
    for n in (1, 2, 5):
        expected = left[:, :n] @ magnitudes[:n].diag() @ right[:n]
        torch.testing.assert_close(u[:, :n] @ v[:, :n].mT, expected)
    torch.testing.assert_close(u.norm(dim=0), magnitudes)  # B = UΣ, A = Vᵀ
    torch.testing.assert_close(v.mT @ v, torch.eye(5, dtype=torch.float64))


def test_flora_stacks_factors_whose_product_is_the_average():
    b, a = [u for u, _ in updates()], [v.mT for _, v in updates()]
    stacked_b, stacked_a = b[0], WEIGHTS[0] * a[0]
    for k in (1, 2):
        stacked_b = torch.cat([stacked_b, b[k]], dim=1)
        stacked_a = torch.cat([stacked_a, WEIGHTS[k] * a[k]], dim=0)
    u, v = aggregation.flora(updates(), WEIGHTS)
    torch.testing.assert_close((u, v.mT), (stacked_b, stacked_a))
    mean = sum(weight * product(factors) for weight, factors in zip(WEIGHTS, updates(), strict=True))
    torch.testing.assert_close(product((u, v)), mean)


def test_flora_starts_each_client_and_each_round_from_new_factors():
    ours = federation("FLoRA")
    starts = [shard.terms["stages.1.0.conv1"].v for t in (0, 1) for _, shard in ours.server.shards({0: 0.2, 1: 0.2}, t)]
    assert len({float(start[0, 0]) for start in starts}) == 4
    ((_, again),) = federation("FLoRA").server.shards({1: 0.2}, 1)
    assert torch.equal(again.terms["stages.1.0.conv1"].v, starts[-1])


@pytest.mark.parametrize("name", ["FedIT", "HetLoRA", "FlexLoRA"])
def test_other_lora_methods_start_all_clients_from_the_same_factors(name):
    starts = [shard.terms["stages.1.0.conv1"].v for _, shard in federation(name).server.shards({0: 0.2, 1: 0.2}, 0)]
    assert torch.equal(*starts)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("top_n", ON_INT4), ("top_n, tail", ON_INT4), ("collective", ON_INT4), ("dense FedAvg", TINY)],
)
def test_rounds_of_the_librarys_methods_equal_those_of_the_program(name, overrides):
    ours = federation(name, overrides)
    program = assemble(ours.experiment.config)
    lines = [ours.train_round(t) for t in range(2)]
    program.start()
    metrics = run_rounds(program, 0)
    assert lines[1]["bytes_up"] == metrics.bytes_up
    assert lines[1]["bytes_down"] == metrics.bytes_down
    torch.testing.assert_close(ours.server.model.state_dict(), program.model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["HetLoRA", "FlexLoRA", "FLoRA"])
def test_lora_starts_at_the_pretrained_model_and_moves_as_its_formula_says(name):
    ours = federation(name)
    before = {key: layer.matrix().detach() for key, layer in ours.server.layers.items()}
    shards = dict(ours.server.shards(ours.experiment.keep_ratios, 0))
    assert all(not terms.u.any() and terms.v.any() for shard in shards.values() for terms in shard.terms.values())
    assert {shard.terms["stages.1.0.conv1"].indices.numel() for shard in shards.values()} == {4, 7}
    moved = {client: trained(shard, client) for client, shard in list(shards.items())[:3]}
    ours.server.step(moved, ours.experiment.num_samples)
    samples = [ours.experiment.num_samples[client] for client in moved]
    weights = [size / sum(samples) for size in samples]
    aggregate = ours.server.aggregate
    for key, layer in ours.server.layers.items():
        factors = [(shard.terms[key].u, shard.terms[key].v) for shard in moved.values()]
        expected = before[key] + product(aggregate(factors, weights)).float()
        torch.testing.assert_close(layer.matrix(), expected, rtol=1e-5, atol=1e-6)
    name = next(iter(moved[min(moved)].whole))
    mean = sum(weight * shard.whole[name] for weight, shard in zip(weights, moved.values(), strict=True))
    torch.testing.assert_close(ours.server.model.state_dict()[name], mean)


@pytest.mark.parametrize("name", ["HetLoRA", "FlexLoRA"])
def test_strong_clients_keep_their_rank_after_a_round_of_weak_ones(name):
    ours = federation(name)
    weak = {client: ratio for client, ratio in ours.experiment.keep_ratios.items() if ratio == 0.2}
    moved = {client: trained(shard, client) for client, shard in ours.server.shards(weak, 0)}
    before = {key: layer.v.detach()[:, 4:].clone() for key, layer in ours.server.layers.items()}
    ours.server.step(moved, ours.experiment.num_samples)
    ((_, shard), *_) = ours.server.shards({0: 0.4}, 1)
    assert shard.terms["stages.1.0.conv1"].v.shape[1] == 7
    if name == "HetLoRA":
        kept = ours.server.layers["stages.1.0.conv1"].v[:, 4:]
        assert torch.equal(kept, before["stages.1.0.conv1"])


@pytest.mark.parametrize("name", ["top_n", "FlexLoRA", "FLoRA"])
def test_round_without_a_finite_update_moves_nothing(name):
    ours = federation(name, [*ON_INT4, "local.optimizer.lr=1e30"])
    before = [part.weight.detach().clone() for part in ours.server.model.modules() if isinstance(part, FactorizedLayer)]
    line = ours.train_round(0)
    after = [part.weight.detach() for part in ours.server.model.modules() if isinstance(part, FactorizedLayer)]
    assert line["num_aggregated"] == 0 < line["num_clients"]
    assert all(map(torch.equal, before, after))


def trained(shard, client):
    random = torch.Generator().manual_seed(client)
    values = {key: value + 0.1 * torch.randn(value.shape, generator=random) for key, value in shard.trained().items()}
    return shard.returned(values)


def test_terms_that_are_drawn_anew_are_terms_of_the_same_weights():
    exact = [word.replace("int4", "float32") for word in ON_INT4]
    ours = federation("top_n, drawn anew", exact)
    layers = {key: part for key, part in ours.server.model.named_modules() if isinstance(part, FactorizedLayer)}
    before = {key: (layer.matrix().detach(), layer.u.detach().clone()) for key, layer in layers.items()}
    redraw_terms(ours.server.model, seed=0, t=0)
    for key, layer in layers.items():
        weight, _ = before[key]
        torch.testing.assert_close(layer.matrix(), weight, rtol=1e-5, atol=1e-5)
        left, magnitudes, _ = torch.linalg.svd(weight, full_matrices=False)
        cosines = (left.T @ layer.u / layer.u.norm(dim=0)).abs()
        assert torch.allclose(cosines.amax(dim=0), torch.ones(layer.num_terms), atol=1e-3)
        drawn = cosines.argmax(dim=0)
        torch.testing.assert_close(layer.u.norm(dim=0) ** 2, magnitudes[drawn], rtol=1e-3, atol=1e-4)
    assert any(not torch.allclose(layer.u, before[key][1], atol=1e-3) for key, layer in layers.items())


def test_residual_is_sent_anew_after_terms_are_drawn_anew():
    ours = federation("top_n, drawn anew", ON_INT4)
    ((_, shard), *_) = ours.server.shards({0: 0.2}, 10)
    anew = len(Frozen(ours.server.frozen.residuals).to_bytes())
    more = [
        ours.server.sent_nbytes(shard, since, t) - shard.nbytes for since, t in ((0, 10), (9, 10), (10, 19), (None, 10))
    ]
    assert more == [anew, anew, 0, 0]


@pytest.mark.parametrize("name", ["FedIT", "HetLoRA", "FlexLoRA", "FLoRA", "head only", "top_n, drawn anew"])
def test_bytes_of_each_method_are_those_of_the_wire(name):
    ours = federation(name, [*TINY, "residual=int4", "keep_ratio=0.2", "strategy=top_n"])
    base, seen = len(ours.server.stored.to_bytes()), set()
    for t in range(2):
        cohort = ours.experiment.sampler.cohort(t)
        shards = dict(ours.server.shards(dict.fromkeys(cohort, 0.2), t))
        rest = sum(
            len(Shard({}, shard.whole, plan_id=shard.plan_id, frozen_digest=shard.frozen_digest).to_bytes())
            for shard in shards.values()
        )
        sent = rest if name == "FLoRA" else sum(len(shard.to_bytes()) for shard in shards.values())
        stacks = ours.server.stacks[0] if name == "FLoRA" and t else 0
        line = ours.train_round(t)
        back = sum(min(stacks, len(Frozen(ours.server.frozen.residuals).to_bytes())) for c in cohort if c in seen)
        assert line["bytes_down"] == sent + base * len({*cohort} - seen) + back
        seen.update(cohort)
        assert line["bytes_first"] == base * len(seen)
        assert line["num_aggregated"] == len(cohort)
