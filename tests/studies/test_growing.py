"""The growing tail: the residual stays, frozen terms are those that were trained, and bytes count what is new."""

from functools import partial

import pytest
import torch

from sharding import Frozen
from sharding.matrices.quantization import dequantize, split_terms
from studies import finetune, growing
from studies.peers.federation import Federation
from studies.peers.servers import factorized
from studies.runner import Arguments
from train.config.schema import load_config

TINY = [
    *("rounds=7", "evaluate_every=1", "model.width=8", "model.groups=4", "model.blocks=[1, 1]", "engine=sequential"),
    *("local.steps=2", "local.decay=0", "server_optimizer=plain", "result=last", "strategy=top_n"),
    *("residual=int4", "keep_ratio=0.3", "clients.per_round=2"),
]
ERA, LAYER = growing.ERA, "stages.1.0.conv2"


def federation(make, *words):
    return Federation.of(load_config("configs/quickstart.yaml", [*TINY, *words]), make)


def growing_tail(fresh, *words):
    return federation(partial(growing.growing, fresh), *words)


def weights(server):
    return {name: layer.matrix().detach().clone() for name, layer in factorized(server.model).items()}


@pytest.mark.parametrize("fresh", [False, True])
def test_terms_of_an_era_are_frozen_in_4_bits_beside_the_same_residual(fresh):
    ours, fixed = growing_tail(fresh), federation(finetune.ours)
    for t in range(ERA):
        assert ours.train_round(t) == fixed.train_round(t)
    server, before = ours.server, weights(ours.server)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(fixed.server).items())
    residuals, parts = dict(fixed.server.frozen.residuals), {}
    of_server = {name: weight + server.lacking[name] for name, weight in before.items()}
    for name, layer in factorized(server.model).items():
        parts[name] = layer.u.detach().clone(), layer.v.detach().clone()
    server.freeze(ERA)
    stored = server.stored.residuals
    for name, layer in factorized(server.model).items():
        u, v = parts[name]
        halves = zip(split_terms(stored[f"{name}/0"], len(u)), (u, v), strict=True)
        frozen_u, frozen_v = (dequantize(half, len(side), torch.float32).mT for half, side in halves)
        for frozen, side in ((frozen_u, u), (frozen_v, v)):
            assert (frozen - side).abs().amax(0).le(side.abs().amax(0) / 7 + 1e-3).all(), "a step of int4"
        base = dequantize(residuals[name], len(v), torch.float32) + frozen_u @ frozen_v.mT
        torch.testing.assert_close(layer.residual, base)
        assert torch.equal(stored[name], residuals[name]), "bit for bit"
        torch.testing.assert_close(layer.matrix() + server.lacking[name], of_server[name], rtol=1e-5, atol=1e-5)
    layer = server.model.get_submodule(LAYER)
    if fresh:
        assert not layer.v.any()
        torch.testing.assert_close(layer.u.mT @ layer.u, torch.eye(layer.num_terms), rtol=1e-5, atol=1e-5)
        ((_, shard),) = server.shards({0: 0.3}, ERA + 1)
        sent = shard.terms[LAYER]
        assert not sent.v.any()
        torch.testing.assert_close(layer.u @ (layer.u.mT @ sent.u), sent.u, rtol=1e-4, atol=1e-5), "the same directions"
    else:
        lacking = (server.lacking[LAYER] + layer.u @ layer.v.mT).detach()
        left, magnitudes, _ = torch.linalg.svd(lacking, full_matrices=False)
        cosines = (left.T @ layer.u / layer.u.norm(dim=0)).abs()
        assert torch.allclose(cosines.amax(dim=0), torch.ones(layer.num_terms), atol=1e-3)
        torch.testing.assert_close(layer.u.norm(dim=0) ** 2, magnitudes[cosines.argmax(0)], rtol=1e-3, atol=1e-4)


def test_client_receives_the_frozen_terms_that_it_lacks_and_holds_all():
    ours = growing_tail(False)
    lines = [ours.train_round(t) for t in range(ours.experiment.config.rounds)]
    server, residual = ours.server, Frozen(dict(growing_tail(False).server.frozen.residuals))
    assert len(server.eras) == 2
    sizes = [len(Frozen(tails).to_bytes()) for tails in server.eras]
    ((_, shard),) = server.shards({0: 0.3}, 7)
    more = [server.sent_nbytes(shard, since, 7) - shard.nbytes for since in (6, 5, 3, 2, 0)]
    assert more == [0, sizes[1], sizes[1], sum(sizes), sum(sizes)]
    assert server.first_nbytes == len(server.stored.to_bytes()) > residual.nbytes + 0.8 * sum(sizes)
    held = [sum(tail.nbytes for tail in tails.values()) for tails in server.eras]
    assert [line["memory_most"] - lines[0]["memory_most"] for line in lines] == [0] * ERA + [held[0]] * ERA + [
        sum(held)
    ]
    numbers = sum(layer.u.numel() + layer.v.numel() for layer in factorized(server.model).values())
    assert numbers * 4.5 / 8 <= held[0] < numbers * 8 / 8, "rows are padded to groups of 32"
    assert all(line["num_aggregated"] == 2 for line in lines)


def test_images_start_from_the_pretrained_network(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("studies.runner.run_all", lambda configs, *_: seen.extend(configs))
    weights = growing.EXPERIMENTS["growing_images"].prepare(Arguments("growing_images", tmp_path))
    assert seen == ["pretrained-0"]
    assert weights == {"": {"model.weights": tmp_path / "runs" / "pretrained-0" / "model.safetensors"}}


def test_arms_differ_in_what_they_say():
    study = growing.EXPERIMENTS["growing_texts"]
    assert [*study.methods] == [*growing.GAP, *growing.ARMS]
    assert study.methods["drawn anew, float32"].overrides == {"residual": "float32"}
    assert study.methods["drawn anew"].overrides == study.methods["top_n"].overrides == {}
    assert {setting: len(scenario.waves) for setting, scenario in study.settings.items()} == {
        "even, α = 1": 2,
        "even, α = 0.1": 1,
    }
