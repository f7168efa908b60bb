"""The client's model from a shard, without the dense one, and a round of training."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from sharding import (
    FactorizedLayer,
    Shard,
    ShardPlanner,
    UserError,
    client_model,
    clip_and_decay,
    factorize,
    init_empty,
    train_shard,
    unpack_attention,
)
from sharding.rounds.codec import Terms
from sharding.rounds.failures import Failure
from sharding.rounds.norms import update_norm
from tests.sharding.models import KINDS, make_net, make_plan, make_skeleton, on_meta
from tests.sharding.test_shard import Tied, assert_same, freeze


@pytest.mark.parametrize("strategy", ["collective", "full", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_client_model_from_a_shard_and_any_structure_equals_factorize(kind, strategy):
    shard = make_plan(make_net(), {0: 0.3}, strategy).shard(0)
    structure = KINDS[kind](make_net)
    before = {name: tensor if tensor.is_meta else tensor.clone() for name, tensor in structure.state_dict().items()}
    small = client_model(structure, shard)
    assert_same(shard.read_from(small), shard)
    assert len([part for part in small.modules() if isinstance(part, FactorizedLayer)]) == len(shard.terms)
    x = torch.randn(2, 1, 4, 4)
    expected = make_net()
    if shard.terms:
        expected = factorize(expected, shard.keep_ratio)
    shard.load_into(expected)
    assert torch.equal(small(x), expected(x))
    for name, tensor in structure.state_dict().items():
        assert tensor.is_meta == (kind != "dense")
        assert tensor.is_meta or torch.equal(tensor, before[name])


def test_client_model_shares_memory_with_the_shard_only_without_copy():
    shard = Shard.from_bytes(make_plan(make_net(), {0: 0.3}).shard(0).to_bytes())
    kept = shard.to_bytes()
    copied, taken = client_model(on_meta(make_net), shard), client_model(on_meta(make_net), shard, copy=False)
    with torch.no_grad():
        copied[0].weight.add_(1)
        copied[1].u.add_(1)
    assert shard.to_bytes() == kept
    assert taken[1].u.data_ptr() == shard.terms["1"].u.data_ptr()
    assert taken[0].weight.data_ptr() == shard.whole["0.weight"].data_ptr()


def test_client_model_from_a_factorized_structure_has_the_terms_of_the_shard():
    model = make_net()
    first, second, larger = (make_plan(model, {0: r}, round=t).shard(0) for r, t in ((0.3, 0), (0.3, 1), (0.5, 0)))
    small = client_model(make_skeleton(make_net), first)
    before = small[1].u.detach().clone()
    for other, num_terms in ((second, 3), (larger, 4)):
        again = client_model(small, other)
        assert_same(other.read_from(again), other)
        assert again[1].num_terms == num_terms
    assert torch.equal(small[1].u, before)


def test_client_model_of_a_double_structure_has_double_values():
    shard = make_plan(make_net(), {0: 0.3}).shard(0)
    for copy in (True, False):
        small = client_model(on_meta(lambda: make_net().double()), shard, copy)
        assert {parameter.dtype for parameter in small.parameters()} == {torch.float64}


PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
from sharding import Shard, client_model, init_empty

def memory(line):
    return next(int(row.split()[1]) for row in Path("/proc/self/status").read_text().splitlines() if line in row) * 1024

def build():
    return nn.Sequential(nn.Linear(16, 4096), *(nn.Linear(4096, 4096) for _ in range(8)), nn.Linear(4096, 16))

nn.Linear(256, 256)(torch.randn(64, 256))  # what torch loads and sets aside at first use
before = memory("VmRSS")
with (torch.device("meta") if sys.argv[2] == "meta" else init_empty()):
    model = build()
shard = Shard.read(Path(sys.argv[1]))
small = client_model(model, shard, copy=False)
with torch.no_grad():
    assert small(torch.randn(64, 16)).shape == (64, 16)
print(memory("VmHWM") - before, shard.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", [pytest.param("meta", marks=pytest.mark.slow), "skeleton"])
def test_client_model_peak_memory_is_below_a_dense_model(kind, tmp_path):
    """A shard that is read, its model built and run, take at most 1.3 shards; the activations of 64 rows are 9 MB."""
    width, n, depth = 4096, 410, 8
    factor = torch.randn(width, n) / 64
    terms = {str(layer): Terms(torch.arange(n), factor + 0, factor + 0, torch.ones(n)) for layer in range(1, depth + 1)}
    dense = {"0.weight": torch.randn(width, 16), "9.weight": torch.randn(16, width), "9.bias": torch.randn(16)}
    dense |= {f"{layer}.bias": torch.randn(width) for layer in range(depth + 1)}
    shard = Shard(terms, dense, 0.1)
    shard.write(tmp_path / "shard")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "shard"), kind]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    peak, nbytes = map(int, run.stdout.split())
    assert nbytes == shard.nbytes
    activations = (depth + 1) * 64 * width * 4
    assert peak <= 1.3 * nbytes + activations
    assert 1.3 * nbytes + activations < 0.3 * depth * width * width * 4  # what a dense model would take


def test_client_model_of_tied_weights_keeps_them_tied():
    shard = make_plan(Tied(), {0: 0.5}).shard(0)
    for structure in (Tied(), on_meta(Tied), make_skeleton(Tied)):
        small = client_model(structure, shard)
        assert small.head.weight is small.embedding.weight
        assert not small.head.weight.is_meta


def test_load_into_of_newly_frozen_layers_freezes_them():
    small = client_model(make_net(), make_plan(make_net(), {0: 0.5}).shard(0))
    make_plan(freeze(make_net(), "1.weight"), {0: 0.5}).shard(0).load_into(small)
    assert {name for name, part in small.named_parameters() if not part.requires_grad} == {"1.u", "1.v"}


@pytest.mark.parametrize("compression", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_untrained_update_in_another_dtype_has_norm_zero(dtype, compression):
    model = make_net()
    plan = ShardPlanner(compression=compression).plan(model, {0: 1.0})
    update = plan.shard(0).read_from(client_model(make_net().to(dtype), plan.shard(0)))
    assert float(update_norm(plan.shard(0), update)) == 0


def test_train_shard_with_a_frozen_batch_norm_keeps_its_statistics():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[2].eval().requires_grad_(False)
    shard, residual = make_plan(model, {0: 0.5}).shard(0), ShardPlanner().frozen(model)
    batch = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    update = train_shard(model, shard, [batch], lr=0.1, frozen=residual)
    assert torch.equal(update.whole["2.running_mean"], model[2].running_mean)


def test_client_model_freezes_parameters_frozen_at_server_or_client():
    server = freeze(make_net(), "0.weight", "1.weight", "4.weight")
    shard, residual = make_plan(server, {0: 0.5}).shard(0), ShardPlanner().frozen(server)
    structure = freeze(on_meta(make_net), "6.weight", "7.bias")
    small = client_model(structure, Shard.from_bytes(shard.to_bytes()), frozen=residual)
    frozen = {name for name, parameter in small.named_parameters() if not parameter.requires_grad}
    assert frozen == {"0.weight", "1.u", "1.v", "4.u", "4.v", "6.u", "6.v", "7.bias"}


def test_client_model_has_the_train_and_eval_modes_of_the_structure():
    structure = on_meta(make_net).eval()
    structure[4].train()
    small = client_model(structure, make_plan(make_net(), {0: 0.5}).shard(0))
    assert [part.training for part in small] == [i == 4 for i in range(8)]


class Encoder(nn.Sequential):
    """A model with one packed attention, whose `out_proj` is the first linear layer that torch registers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3)
        )


ATTENTIONS = {  # the server's model, its planner, and structures of clients
    "unpacked": (
        unpack_attention(Encoder()),
        ShardPlanner("full"),
        (on_meta(Encoder), make_skeleton(Encoder), unpack_attention(on_meta(Encoder))),
    ),
    "packed": (Encoder(), ShardPlanner("dense"), (on_meta(Encoder),)),
    "skipped": (Encoder(), ShardPlanner("full", skip=["1.self_attn", "last"]), (on_meta(Encoder),)),
}


@pytest.mark.parametrize(("server", "planner", "structures"), ATTENTIONS.values(), ids=ATTENTIONS)
def test_client_model_has_attention_as_the_server_has_it(server, planner, structures):
    shard, ids = planner.plan(server, {0: 1.0}).shard(0), torch.arange(6)[None]
    rtol, atol = (1e-4, 1e-5) if shard.terms else (0, 0)
    for structure in structures:
        small = client_model(structure, shard)
        assert type(small[1].self_attn) is type(server[1].self_attn)
        torch.testing.assert_close(small(ids), server(ids), rtol=rtol, atol=atol)


def test_client_model_of_attention_with_kdim_keeps_it_packed():
    """With kdim and vdim the projections are parameters such as `q_proj_weight`."""
    server, structure = (KINDS[kind](lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6)) for kind in ("dense", "meta"))
    shard = ShardPlanner("dense").plan(server, {0: 1.0}).shard(0)
    assert torch.equal(client_model(structure, shard).q_proj_weight, server.q_proj_weight)


@pytest.mark.parametrize("kind", ["on meta", "with values", "loaded again"])
def test_batch_norms_have_the_servers_statistics_and_count_from_zero(kind):
    def build():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 6), nn.Linear(6, 3))

    server, used, x = build(), build(), torch.randn(8, 4)
    for model in (server, used):
        model(torch.randn(8, 4))
    shard = make_plan(server.eval(), {0: 1.0}, "full").shard(0)
    small = client_model(on_meta(build) if kind == "on meta" else used, shard)
    if kind == "loaded again":
        small(torch.randn(8, 4))
        shard.load_into(small)
    torch.testing.assert_close(small.eval()(x), server(x), rtol=1e-4, atol=1e-5)
    assert small[1].num_batches_tracked == 0
    small.train()(x)  # the mean over all batches is that of the only one
    torch.testing.assert_close(small[1].running_mean, small[0](x).mean(0))
    assert used[1].num_batches_tracked == 1


def test_training_in_place_of_a_read_shard_leaves_the_file_unchanged(tmp_path):
    path, shard = tmp_path / "shard", make_plan(make_net(), {0: 0.3}).shard(0)
    shard.write(path)
    before, (inputs, targets) = path.read_bytes(), batches()[0]
    model = client_model(make_skeleton(make_net), Shard.read(path), copy=False)
    F.cross_entropy(model(inputs), targets).backward()
    SGD(model.parameters(), lr=0.1).step()
    assert path.read_bytes() == before
    assert not torch.equal(model[1].u, shard.terms["1"].u)


class Positions(nn.Sequential):
    """A net with a table that no state dict has, and one of integers."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("places", torch.arange(4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        return super().forward(x + self.table[self.places] * self.scale)


def test_client_model_with_nonpersistent_buffers_needs_init_empty():
    server, x = Positions(), torch.randn(2, 4)
    with torch.no_grad():
        server.scale.fill_(3.0)
    shard = make_plan(server, {0: 1.0}, "full").shard(0)
    torch.testing.assert_close(client_model(make_skeleton(Positions), shard)(x), server(x))
    with pytest.raises(UserError, match=r"^the shard has no values for table, which .*sharding.init_empty\(\)"):
        client_model(on_meta(Positions), shard)


def test_init_empty_keeps_requires_grad_and_allocates_no_parameters():
    model = make_skeleton(lambda: freeze(make_net(), "0.weight"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model[0].weight.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta  # it ends with the block


def test_init_empty_of_a_shared_parameter_keeps_it_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.one.weight = self.two.weight = nn.Parameter(torch.ones(3, 3))

    tied = make_skeleton(Tied)
    assert tied.one.weight is tied.two.weight
    assert tied.one.weight.is_meta


def test_init_empty_in_threads_empties_the_models_of_its_own_thread_only():
    def build(number):
        if number % 2:
            return nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        return make_skeleton(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))

    with ThreadPoolExecutor(8) as threads:
        models = list(threads.map(build, range(200)))
    for number, model in enumerate(models):
        assert [part.is_meta for part in model.parameters()] == [number % 2 == 0] * 8


def test_init_empty_inside_another_ends_with_the_outer_one():
    with init_empty():
        make_skeleton(make_net)
        assert nn.Linear(2, 2).weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


class Peeking(nn.Linear):
    """A layer whose constructor reads its own weights."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = float(self.weight.abs().max())


class Stateful(nn.Linear):
    """A layer whose constructor moves a table to where its own weights are."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", self.weight.sum(0).to("cpu"))


def refuse():
    raise RuntimeError("cannot parse metadata")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Peeking, UserError, "build this model outside"),
        (Stateful, UserError, "build this model outside"),
        (lambda: nn.Linear(-1, 4), RuntimeError, "negative dimension"),
        (refuse, RuntimeError, "cannot parse metadata"),
    ],
)
def test_init_empty_of_a_constructor_that_reads_values_or_fails_raises(make, error, message):
    with pytest.raises(error, match=message):
        make_skeleton(make)


class Siamese(nn.Module):
    """A net with a layer that it uses by way of a plain list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.aside = [self.layers[1]]

    def forward(self, x):
        for layer in (*self.layers, *self.aside):
            x = layer(x)
        return x


def test_replaced_layer_also_in_a_plain_list_warns():
    with pytest.warns(UserWarning, match="aside still refers to a layer that was replaced"):
        client_model(Siamese(), make_plan(Siamese(), {0: 0.3}).shard(0))
    with pytest.warns(UserWarning, match="aside still refers"):
        factorize(Siamese(), 0.3)


def batches(count=3):
    rng = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 1, 4, 4, generator=rng), torch.randint(3, (4,), generator=rng)) for _ in range(count)]


def by_hand(shard, clip, decay):
    """The update of a client that trains with momentum, a clip and a decay."""
    model = client_model(make_skeleton(make_net), shard)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizer.register_step_pre_hook(clip_and_decay(model, clip, decay))
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return shard.read_from(model)


def test_train_shard_equals_clipped_decayed_sgd_on_the_client_model():
    shard = replace(make_plan(make_net(), {0: 0.3}, "unbiased").shard(0), clip=2.0)
    sent = shard.to_bytes()
    update = train_shard(make_skeleton(make_net), shard, batches(), lr=0.1, decay=0.01)
    assert_same(update, by_hand(shard, 2.0, 0.01))
    make = partial(SGD, lr=0.1, momentum=0.9, fused=True)
    assert_same(train_shard(make_net(), shard, batches(), make_optimizer=make, decay=0.01), update)
    assert shard.to_bytes() == sent
    clips = {clip: replace(shard, clip=clip) for clip in (None, 2.0, 3.0)}
    usual, strong = {"shard": shard, "lr": 0.1, "decay": 0.01}, {"shard": clips[None], "lr": 0.1, "decay": 1.0}
    for first, changed in (
        (usual, {"shard": clips[None]}),
        (usual, {"shard": clips[3.0]}),
        (usual, {"decay": 0.0}),
        (usual, {"lr": None, "make_optimizer": lambda parameters: SGD(parameters, lr=0.1)}),
        (strong, {"decay_of": "effective"}),
    ):
        one, other = (
            train_shard(make_skeleton(make_net), batches=batches(), **arguments)
            for arguments in (first, first | changed)
        )
        assert not torch.equal(other.terms["1"].u, one.terms["1"].u)


@pytest.mark.parametrize(("strategy", "clip"), [("prism_wallenius", None), ("prism_wallenius_clip", 1.5)])
def test_train_shard_clips_as_the_strategy_does(strategy, clip):
    plan = ShardPlanner(strategy, clip=1.5).plan(make_net(), {0: 0.3})
    shard = Shard.from_bytes(plan.shard(0).to_bytes())
    assert max(float(terms.multipliers.max()) for terms in shard.terms.values()) > 1.5
    assert shard.clip == clip
    update = train_shard(make_skeleton(make_net), shard, batches(), lr=0.1, decay=0)
    assert_same(update, by_hand(shard, clip, 0))


def test_train_shard_of_a_fully_frozen_model_raises():
    server = make_net().requires_grad_(False)
    shard, residual = make_plan(server, {0: 0.3}).shard(0), ShardPlanner().frozen(server)
    with pytest.raises(UserError, match="all parameters of the model are frozen"):
        train_shard(make_net(), shard, batches(), lr=0.1, frozen=residual)


def test_training_with_batch_norm_on_one_sample_hints_at_drop_last():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 3))
    shard = ShardPlanner().plan(model, {0: 0.5}).shard(0)
    with pytest.raises(UserError, match=r"Expected more than 1 value per channel.*drop_last=True") as raised:
        train_shard(model, shard, [(torch.randn(1, 4), torch.tensor([0]))], lr=0.1)
    assert isinstance(raised.value.__cause__, ValueError)
    assert "drop_last=True" in Failure.in_training(raised.value.__cause__).message


def test_client_model_made_in_inference_mode_trains():
    shard, structure = ShardPlanner("top_n").plan(make_net(), {"phone": 0.5}).shard("phone"), make_skeleton(make_net)
    with torch.inference_mode():
        model = client_model(structure, shard)
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in model.parameters())


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by class, without hooks of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


EMPTY = torch.ones(0, 64), torch.ones(0, dtype=torch.int64)
REFUSED = {
    "neither": ({"lr": None}, "either lr=…, for SGD with momentum, or make_optimizer=…"),
    "both": ({"make_optimizer": SGD}, "either lr=…, for SGD with momentum, or make_optimizer=…"),
    "no batches": ({"batches": []}, "no batches to train on"),
    "a used iterator": ({"batches": iter([])}, "no batches to train on"),
    "no samples": ({"batches": [EMPTY]}, "a batch has no samples"),
    "no samples in a dict": ({"batches": [{"input": EMPTY[0], "labels": EMPTY[1]}]}, "a batch has no samples"),
    "closure": ({"lr": None, "make_optimizer": torch.optim.LBFGS}, "LBFGS needs a closure"),
    "wrapper": ({"lr": None, "make_optimizer": lambda part: Wrapper(SGD(part, lr=0.1))}, "pass the optimizer in it"),
    "tuple": ({"lr": None, "make_optimizer": lambda part: (SGD(part, lr=0.1), None)}, "the optimizer is a tuple"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_train_shard_that_cannot_train_is_refused(arguments, message):
    shard = make_plan(make_net(), {0: 0.5}).shard(0)
    with pytest.raises(UserError, match=message):
        train_shard(make_skeleton(make_net), shard, **{"batches": batches(), "lr": 0.1} | arguments)
