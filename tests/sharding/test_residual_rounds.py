"""Rounds on a factorized server: shards of L = UVᵀ, and a residual that clients keep."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from sharding import (
    FactorizedLayer,
    Frozen,
    Server,
    Shard,
    ShardPlanner,
    UserError,
    client_model,
    factorize,
    merge,
    train_shard,
)
from sharding.modules.wrappers import full_tensor
from tests.sharding.models import KINDS, make_net, perturbed
from tests.sharding.test_residual import IDS, Net

RATIO = 0.5
LAYERS = {"1", "4", "6"}


def make_server(residual_format="int4", strategy="top_n", ratio=RATIO, optimizer=None, **options):
    model = factorize(make_net(), ratio, residual_format=residual_format)
    make = optimizer or (lambda weights: torch.optim.SGD(weights, lr=1.0))
    return Server(model, ShardPlanner(strategy, **options), make(model.parameters()))


def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 1, 4, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def train(server, structure, lr=0.1, batches=3):
    residual = Frozen.from_bytes(server.frozen.to_bytes()) if server.frozen.residuals else None
    return lambda client, shard: train_shard(
        structure, Shard.from_bytes(shard.to_bytes()), [images()] * batches, lr, frozen=residual
    )


@pytest.mark.parametrize("residual", [None, "int4", "float32"])
def test_a_client_with_all_terms_computes_what_the_server_does(residual):
    server = make_server(residual)
    shard = server.plan({0: RATIO}, 0).shard(0)
    assert set(shard.terms) == LAYERS
    small = client_model(make_net(), shard, frozen=server.frozen if residual else None)
    x = images()[0]
    torch.testing.assert_close(small(x), server.model(x), rtol=1e-4, atol=1e-5)
    if residual == "float32":
        torch.testing.assert_close(small(x), make_net()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", KINDS)
def test_a_structure_of_any_kind_becomes_the_clients_model(where):
    server = make_server()
    shard = server.plan({0: 0.2}, 0).shard(0)
    small = client_model(KINDS[where](make_net), shard, frozen=server.frozen)
    x = images()[0]
    assert torch.equal(small(x), client_model(small, shard, frozen=server.frozen)(x))
    assert {name for name, part in small.named_modules() if isinstance(part, FactorizedLayer)} == LAYERS
    for name in LAYERS:
        assert small.get_submodule(name).residual is server.model.get_submodule(name).residual  # not a copy


def test_a_round_without_training_changes_nothing():
    server = make_server()
    before = deepcopy(server.model.state_dict())
    outcome = server.round(0, {0: 0.5, 1: 0.2}, lambda client, shard: shard.returned(shard.trained()))
    assert outcome.accepted == [0, 1]
    for name, tensor in server.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["top_n", "collective", "unbiased"])
def test_the_weight_moves_by_the_averages_of_the_drawn_terms(strategy):
    server = make_server("int8", strategy)
    before = {name: server.model.get_submodule(name).weight.detach().double() for name in LAYERS}
    plan = server.plan({0: 0.5, 1: 0.25, 2: 0.25}, 0)
    weights = {0: 1.0, 1: 2.0, 2: 4.0}
    updates = {client: shard.returned(perturbed(shard, client).trained()) for client, shard in plan.shards()}
    average = server.average(plan, weights)
    for client, update in updates.items():
        average.add(client, update)
    server.step(average)
    for name in LAYERS:
        expected = before[name].flatten(1)
        for index in plan.spectra[name].indices:
            old = [side.double() for side in plan.spectra[name].cut(index[None])]
            sums, total = [0, 0], 0
            for client, update in updates.items():
                terms = update.terms[name]
                held = [part[:, terms.indices == index].double() for part in (terms.u, terms.v)]
                if held[0].numel() == 0 and name in plan.shard(client).tail:  # it has the term, frozen
                    held = old
                if held[0].numel():
                    sums = [side + weights[client] * part for side, part in zip(sums, held, strict=True)]
                    total += weights[client]
            if total:
                expected = expected + (sums[0] / total) @ (sums[1] / total).mT - old[0] @ old[1].mT
        actual = server.model.get_submodule(name).weight.detach().double().flatten(1)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("optimizer", "compression"), [("nesterov", "float32"), ("adam", "int8")])
def test_clients_of_unequal_ratios_fine_tune_a_model(optimizer, compression):
    make = {
        "nesterov": lambda weights: torch.optim.SGD(weights, lr=0.5, momentum=0.5, nesterov=True),
        "adam": lambda weights: torch.optim.Adam(weights, lr=0.02, eps=1e-3),
    }[optimizer]
    server = make_server(optimizer=make, compression=compression)
    loss = nn.functional.cross_entropy
    frozen, x, y = server.frozen.digest, *images()
    before = float(loss(server.model(x), y).detach())
    for number in range(8):
        server.round(number, {"a": 0.5, "b": 0.2, "c": 0.1}, train(server, make_net()))
    assert float(loss(server.model(x), y).detach()) < 0.7 * before
    assert server.frozen.digest == frozen
    assert all(server.model.get_submodule(name).num_terms == part for name, part in {"1": 4, "4": 4, "6": 5}.items())


def test_a_plan_of_factors_decomposes_no_weight(monkeypatch):
    server = make_server(ratio=0.1)
    sizes = []
    for name in ("eigh", "svd", "qr"):
        original = getattr(torch.linalg, name)
        monkeypatch.setattr(
            torch.linalg,
            name,
            lambda matrix, *args, original=original, **words: (
                sizes.append(matrix.shape[-1]) or original(matrix, *args, **words)
            ),
        )
    server.plan({0: 0.1}, 0)
    assert sizes
    assert max(sizes) == 1  # the terms of each layer at this ratio


@pytest.mark.parametrize("strategy", ["top_n", "collective", "unbiased", "full", "prism", "schatten"])
def test_every_strategy_draws_from_the_terms_that_there_are(strategy):
    server = make_server(strategy=strategy, ratio=0.4)
    plan = server.plan({0: 0.1, 1: 0.3, 2: 1.0}, 0)
    available = {"1": 4, "4": 4, "6": 4}
    for client, shard in plan.shards():
        for name, terms in shard.terms.items():
            rank = 10 if name == "6" else 8
            ratio = 1.0 if strategy == "full" else {0: 0.1, 1: 0.3, 2: 1.0}[client]
            assert terms.indices.numel() == min(available[name], -int(-rank * ratio // 1))
    assert ShardPlanner(strategy).nbytes(server.model, 0.3, 1.0) == plan.shard(1).nbytes


def test_layers_that_factorize_chose_are_sharded_whatever_the_planner_skips():
    model = factorize(make_net(), 0.5, skip=["1", "last"], residual_format="int4")
    plan = ShardPlanner("top_n", skip=["4"]).plan(model, {0: 0.5})
    assert set(plan.spectra) == set(model.factorize_report.layers)


def test_a_transformer_with_unpacked_attention_goes_through_a_round():
    torch.manual_seed(0)
    net = Net()
    server = Server(factorize(net, 0.25, "head", also=nn.Embedding, residual_format="int8"), ShardPlanner("top_n"))
    residual, targets = server.frozen, torch.randint(5, (2, 6))

    def update(client, shard):
        batches = [(IDS, targets)] * 3
        loss = lambda made, wanted: nn.functional.cross_entropy(made.mT, wanted)  # noqa: E731
        return train_shard(Net(), shard, batches, 0.1, frozen=residual, loss=loss)

    before = server.model(IDS).detach()
    assert server.round(0, {0: 0.25, 1: 0.1}, update).accepted == [0, 1]
    assert (server.model(IDS) - before).abs().max() > 1e-3
    torch.testing.assert_close(merge(server.model)(IDS), server.model(IDS), rtol=1e-4, atol=1e-5)


def test_a_model_takes_no_more_memory_than_terms_and_residual():
    model = factorize(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), 0.05, (), residual_format="int4")
    server = Server(model, ShardPlanner("top_n"))
    small = client_model(model, server.plan({0: 0.05}, 0).shard(0), frozen=server.frozen)
    nbytes = sum(part.nbytes for part in (*small.parameters(), *small.buffers()))
    assert nbytes < 3 * 256 * 256 * (4.5 / 8) + 3 * 4 * (2 * 256 * 13 + 13 + 256) + 1


# The residual as a message


@pytest.mark.parametrize("residual", ["int4", "int8", "bfloat16", "float32"])
def test_a_residual_survives_its_wire_form(residual, tmp_path):
    sent = make_server(residual).frozen
    assert set(sent.residuals) == LAYERS
    data = sent.to_bytes()
    assert len(data) == sent.nbytes
    sent.write(tmp_path / "residual")
    for received in (Frozen.from_bytes(data), Frozen.read(str(tmp_path / "residual"))):
        assert received.digest == sent.digest
        assert received.residuals.keys() == sent.residuals.keys()
        assert all(torch.equal(received.residuals[name], stored) for name, stored in sent.residuals.items())


def test_a_digest_depends_on_names_types_shapes_and_values():
    base = {"a": torch.zeros(2, 6), "b": torch.ones(3)}
    others = [
        {"a": torch.zeros(2, 6), "c": torch.ones(3)},
        {"a": torch.zeros(2, 6, dtype=torch.int32), "b": torch.ones(3)},
        {"a": torch.zeros(3, 4), "b": torch.ones(3)},
        {"a": torch.zeros(2, 6), "b": torch.tensor([1.0, 1.0, 1.0000001])},
        {"a": torch.zeros(2, 6)},
    ]
    digests = [Frozen(layers).digest for layers in (base, *others)]
    assert len(set(digests)) == 6
    assert Frozen(dict(reversed(base.items()))).digest == digests[0]
    assert Frozen({}).digest == ""


def test_a_shard_and_a_residual_read_in_inference_mode_train_as_others_do(tmp_path):
    server, batches = make_server(), [images()]
    shard = server.plan({0: 0.2, 1: RATIO}, 0).shard(0)
    expected = train_shard(make_net(), shard, batches, lr=0.1, frozen=server.frozen).to_bytes()
    shard.write(tmp_path / "shard")
    server.frozen.write(tmp_path / "residual")
    sent, kept = shard.to_bytes(), server.frozen.to_bytes()
    with torch.inference_mode():
        for read, residual in (
            (Shard.from_bytes(sent), Frozen.from_bytes(kept)),
            (Shard.read(tmp_path / "shard"), Frozen.read(tmp_path / "residual")),
        ):
            assert read.tail
            assert train_shard(make_net(), read, batches, lr=0.1, frozen=residual).to_bytes() == expected
        copies = {name: stored.clone() for name, stored in residual.residuals.items()}
        assert Frozen(copies).digest == Frozen(residual.residuals).digest


def test_bytes_and_files_that_are_no_frozen_part_are_told_in_one_line(tmp_path):
    data = make_server().frozen.to_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    shard = make_server().plan({0: 0.5}, 0).shard(0).to_bytes()
    (tmp_path / "text").write_text("text")
    for read, given, message in (
        (Frozen.from_bytes, flipped, r"is spoiled: its digest is '[\w-]+', not '[\w-]+'; get it again"),
        *((Frozen.from_bytes, data[:n], f"these {n} bytes are not a frozen part") for n in (0, 7, 100, len(data) - 1)),
        (Frozen.from_bytes, shard, "this is not a frozen part: its metadata has"),
        (Frozen.from_bytes, "x", "a str is not a frozen part"),
        (Shard.from_bytes, data, r"these .* bytes are not a shard|this is not a shard"),
        (Frozen.read, tmp_path / "none", r"cannot read the frozen part .*none: No such file"),
        (Frozen.read, tmp_path / "text", "text is not a frozen part"),
    ):
        with pytest.raises(UserError, match=message):
            read(given)


def test_a_client_without_the_residual_or_with_another_says_so():
    server, other = make_server(), make_server("int8")
    shard = server.plan({0: 0.5}, 0).shard(0)
    digest = server.frozen.digest
    assert Shard.from_bytes(shard.to_bytes()).frozen_digest == shard.frozen_digest == digest
    with pytest.raises(UserError, match=f"this shard needs the frozen part {digest}, and the client has none: get"):
        client_model(make_net(), shard)
    theirs = other.frozen.digest
    with pytest.raises(UserError, match=f"needs the frozen part {digest}, and the client has {theirs}, of"):
        client_model(make_net(), shard, frozen=other.frozen)
    plain = make_server(None).plan({0: 0.5}, 0).shard(0)
    assert plain.frozen_digest == ""
    with pytest.raises(UserError, match=f"this shard needs no frozen part, and the client has {digest}"):
        client_model(make_net(), plain, frozen=server.frozen)
    small = client_model(make_net(), plain)
    with pytest.raises(UserError, match=f"its layers have no residual, not {digest[:32]}"):
        shard.load_into(small)
    later = client_model(make_net(), shard, frozen=server.frozen)
    shard.load_into(later)
    assert client_model(later, plain)[1].residual is None


@pytest.mark.parametrize("residual", ["int4", "int8", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_client_takes_the_residual_of_a_model_that_was_cast(residual, dtype):
    server = make_server(residual)
    server.model.to(dtype)
    small = client_model(make_net().to(dtype), server.plan({0: 0.5}, 0).shard(0), frozen=server.frozen)
    x = images()[0].to(dtype)
    torch.testing.assert_close(small(x), server.model(x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda kept: Frozen(kept | {"6": kept["1"]}),
            r"the residual of 6, torch.uint8 of shape \[8, 2, 18\], does not fit this Fact",
        ),
        (
            lambda kept: Frozen(kept, {"0.scale": torch.ones(3)}),
            r"the frozen part has 0.scale, torch.float32 of shape \[3\]",
        ),
    ],
    ids=["another shape", "an unknown parameter"],
)
def test_a_frozen_part_that_does_not_fit_the_model_is_refused(change, message):
    server = make_server()
    wrong = change(server.frozen.residuals)
    shard = replace(server.plan({0: 0.5}, 0).shard(0), frozen_digest=wrong.digest)
    with pytest.raises(UserError, match=message):
        client_model(make_net(), shard, frozen=wrong)


def test_models_that_cannot_be_the_servers_are_refused():
    model = make_server().model
    with pytest.raises(
        UserError, match="this strategy sends whole weights, and 1, 4, 6 are factorized; merge the model"
    ):
        ShardPlanner("dense").plan(model, {0: 0.5})
    shard = make_server(strategy="unbiased").plan({0: 0.2}, 0).shard(0)
    small = client_model(make_net(), shard, frozen=make_server().frozen)
    with pytest.raises(UserError, match="layer 1 has multipliers other than 1, as a client's"):
        ShardPlanner("top_n").plan(small, {0: 0.2})
    model[4].v.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="layer 4: its weight has NaN or Inf"):
        ShardPlanner("top_n").plan(model, {0: 0.2})


def test_a_residual_in_bfloat16_does_not_forbid_compression():
    server = make_server("bfloat16", compression="bfloat16")
    assert server.round(0, {0: 0.5}, train(server, make_net())).accepted == [0]


@pytest.mark.usefixtures("group")
def test_a_server_whose_factors_fsdp_holds_in_pieces_ends_with_the_same_model():
    plain, pieces = make_server(), make_server()
    for part in [pieces.model.get_submodule(name) for name in LAYERS]:
        fully_shard(part)
    pieces = Server(pieces.model, ShardPlanner("top_n"), torch.optim.SGD(pieces.model.parameters(), lr=1.0))
    assert pieces.frozen.digest == plain.frozen.digest
    for server in (plain, pieces):
        server.round(0, {0: 0.5, 1: 0.2}, train(plain, make_net()))
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(full_tensor(pieces.model.state_dict()[name]), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_are_sent_once_and_kept_and_frozen_terms_are_sent(dtype):
    net = make_net()
    net[4].weight.requires_grad_(False)
    server = Server(factorize(net, RATIO, residual_format="int4"), ShardPlanner("top_n"))
    server.model[0].requires_grad_(False)
    residual, once = Frozen.from_bytes(server.frozen.to_bytes()), {"0.weight", "0.bias"}
    assert (set(residual.residuals), set(residual.parameters)) == (LAYERS, once)
    shard, before = server.plan({0: RATIO}, 0).shard(0), deepcopy(server.model.state_dict())
    assert shard.fixed == {"4"}
    assert not once & shard.whole.keys()
    small = client_model(make_net().to(dtype), shard, frozen=residual)
    assert torch.equal(small[0].weight, server.model[0].weight.to(dtype))
    assert not small[0].weight.requires_grad
    shard.load_into(small)
    assert not once & shard.read_from(small).whole.keys()
    server.round(0, {0: RATIO}, train(server, make_net()))
    moved = {name for name, tensor in server.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name.split(".")[0] for name in moved} == {"1", "2", "6", "7"}


def test_digest_follows_a_change_of_a_frozen_parameter():  # it is read again
    server = make_server(None)
    assert (server.frozen.digest, len(server.frozen)) == ("", 0)
    server.model[0].weight.requires_grad_(False)
    digest, shard = server.frozen.digest, server.plan({0: 0.5}, 0).shard(0)
    assert shard.frozen_digest == digest
    with torch.no_grad():
        server.model[0].weight[0, 0] += 1
    assert server.frozen.digest != digest
    with pytest.raises(UserError, match=f"needs the frozen part {digest}, and the client has {server.frozen.digest}"):
        client_model(make_net(), shard, frozen=server.frozen)
