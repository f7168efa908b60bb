"""Shards, clipping, decay and aggregation on models inside DDP, torch.compile and FSDP2."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import spawn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from sharding import (
    Shard,
    ShardPlanner,
    Update,
    UserError,
    client_model,
    clip_and_decay,
    export_lora,
    factorize,
    load_factorized,
    merge,
    save_factorized,
    train_shard,
)
from sharding.layers.base import factorized_layers
from sharding.modules.wrappers import named_modules, named_parameters, named_state, unwrap
from tests.sharding.models import aggregate, make_plan
from tests.sharding.test_shard import assert_same


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


WRAPPERS = {
    "compile": torch.compile,
    "DataParallel": DataParallel,
    "DDP": DistributedDataParallel,
    "compile in DDP": lambda model: DistributedDataParallel(torch.compile(model)),
    "DDP in compile": lambda model: torch.compile(DistributedDataParallel(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.usefixtures("group")
def test_round_with_a_wrapped_model_equals_the_plain_one(wrap):
    server, plain = build(), build()
    plan = make_plan(wrap(server), {0: 0.5}, "unbiased")
    assert plan.shard(0).to_bytes() == make_plan(plain, {0: 0.5}, "unbiased").shard(0).to_bytes()
    client = client_model(wrap(build()), plan.shard(0))
    with torch.no_grad():
        client[1].u.zero_()
    plan.shard(0).load_into(wrap(client))
    assert_same(plan.shard(0).read_from(wrap(client)), plan.shard(0))
    assert factorized_layers(wrap(client)) == factorized_layers(client)
    update = deepcopy(plan.shard(0).read_from(client))
    update.whole["0.bias"].add_(1)
    for model in (wrap(server), plain):
        assert aggregate(model, plan, {0: update}, {0: 1}).accepted == [0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(server.parameters(), plain.parameters(), strict=True))
    torch.testing.assert_close(server[0].bias, build()[0].bias + 1)


def round_of_training(model: nn.Module, shard: Shard) -> Update:
    """Train two steps; every process takes its half of the batch, if there are several."""
    shard.load_into(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(clip_and_decay(model, clip=1.5, decay=0.01))
    rng = torch.Generator().manual_seed(0)
    for _ in range(2):
        inputs, targets = torch.randn(8, 8, generator=rng), torch.randint(8, (8,), generator=rng)
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
            inputs, targets = inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return shard.read_from(model)


def train_with_fsdp(rank: int, ranks: int, store: str, shard: Shard, expected: Update) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        model = client_model(build(), shard)
        for part in (*model, model):
            fully_shard(part)
        assert isinstance(model[1].u, DTensor)
        shard.load_into(model)
        returned = round_of_training(model, shard)
        torch.testing.assert_close(returned.trained(), expected.trained(), rtol=1e-4, atol=1e-6)
        server, plain = fully_shard(build()), build()
        plan = ShardPlanner("unbiased").plan(server, {0: 0.5})
        assert plan.shard(0).to_bytes() == shard.to_bytes()
        for model, rate in ((server, 0.5), (plain, 0.5)):
            assert aggregate(model, plan, {0: expected}, {0: 1}, server_lr=rate).accepted == [0]
        for mine, theirs in zip(server.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)
        dist.barrier()  # a rank that leaves while another still computes may end by SIGABRT
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_round_with_fsdp_models_equals_the_round_without(ranks, tmp_path):
    shard = ShardPlanner("unbiased").plan(build(), {0: 0.5}).shard(0)
    expected = round_of_training(client_model(build(), shard), shard)
    arguments = (ranks, f"{tmp_path}/store", shard, expected)
    if ranks == 1:
        train_with_fsdp(0, *arguments)
    else:
        spawn(train_with_fsdp, arguments, ranks)


def build_nested() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


INNER = {
    "checkpoint": checkpoint_wrapper,
    "compile": lambda part: torch.compile(part, backend="eager"),
    "DDP": DistributedDataParallel,
    "average": AveragedModel,
    "compile in checkpoint": lambda part: checkpoint_wrapper(torch.compile(part, backend="eager")),
    "checkpoint in average": lambda part: AveragedModel(checkpoint_wrapper(part)),
}


def wrap(model, wrapper):
    """Wrap the block in a model, and the last layer in the block."""
    model[1][2] = wrapper(model[1][2])
    model[1] = wrapper(model[1])
    return model


@pytest.fixture(params=INNER)
def wrap_parts(request, group):
    return lambda model: wrap(model, INNER[request.param])


def test_names_in_a_model_with_wrapped_parts_have_no_wrapper_prefix(wrap_parts):
    plain, wrapped = build_nested(), wrap_parts(build_nested())
    for names in (named_modules, named_parameters):
        assert [name for name, _ in names(wrapped)] == [name for name, _ in names(plain)]
    assert list(named_state(wrapped)) == list(plain.state_dict())
    assert [name for name, _ in named_modules(plain)] == [name for name, _ in plain.named_modules()]


# torch.compile of a part reads the gradient of its input.
COMPILED = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@COMPILED
def test_round_with_wrapped_parts_equals_the_round_without(wrap_parts):
    batch = (torch.randn(6, 8), torch.arange(6) % 4)
    server = wrap_parts(build_nested())
    shard = ShardPlanner().plan(server, {0: 0.5}).shard(0)
    assert shard.to_bytes() == ShardPlanner().plan(build_nested(), {0: 0.5}).shard(0).to_bytes()
    expected = train_shard(build_nested(), shard, [batch], lr=0.1)
    assert_same(train_shard(wrap_parts(build_nested()), shard, [batch], lr=0.1), expected)
    client = wrap_parts(client_model(build_nested(), shard))
    assert_same(shard.read_from(client), shard)
    plan = ShardPlanner().plan(server, {0: 0.5})
    assert aggregate(server, plan, {0: expected}, {0: 1}).accepted == [0]


@COMPILED
def test_factorize_save_and_merge_with_wrapped_parts_equal_the_plain_ones(wrap_parts, tmp_path):
    model, x = wrap_parts(build_nested()).eval(), torch.randn(3, 8)
    model(x)  # a compiled part keeps its function
    small, plain = factorize(model, 0.25), factorize(build_nested().eval(), 0.25)
    assert small.factorize_report.layers.keys() == plain.factorize_report.layers.keys() == {"1.0", "1.2"}
    torch.testing.assert_close(small(x), plain(x))
    torch.testing.assert_close(merge(small)(x), plain(x))
    save_factorized(small, tmp_path)
    torch.testing.assert_close(load_factorized(tmp_path, build_nested().eval())(x), plain(x))


@pytest.mark.parametrize("wrap", INNER.values(), ids=INNER)
def test_merge_inside_any_wrapper_equals_the_model_and_has_no_report(group, wrap):
    small, x = factorize(build_nested().eval(), 0.25), torch.randn(3, 8)
    merged = merge(wrap(deepcopy(small)))
    torch.testing.assert_close(merged(x), small(x))
    assert not hasattr(unwrap(merged), "factorize_report")


def test_save_of_an_averaged_model_is_loaded(tmp_path):
    small = factorize(build(), 0.25)
    save_factorized(AveragedModel(small), tmp_path)
    assert_equal(load_factorized(tmp_path, build()), small)


@pytest.mark.usefixtures("group")
def test_ddp_after_factorize_inplace_reduces_the_gradients_of_the_factors():
    small = factorize(DistributedDataParallel(build()), 0.25, inplace=True)
    calls = []
    small.register_comm_hook(None, lambda state, bucket: calls.extend(bucket.parameters()) or future(bucket.buffer()))
    small(torch.randn(2, 8)).sum().backward()
    assert {id(part) for part in calls} == {id(part) for part in small.parameters()}


def future(tensor):
    done = torch.futures.Future()
    done.set_result(tensor)
    return done


def assert_equal(one, other):
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=0, atol=0)


@pytest.mark.usefixtures("group")
def test_fsdp_with_mixed_precision_computes_in_its_dtype():
    small, x = factorize(build(), 0.25), torch.randn(2, 8)
    expected = small(x)
    for part in (*small, small):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    output = small(x)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.05)


def test_half_precision_parameters_with_float_buffers_compute_in_half():
    layers = [nn.Conv1d(8, 8, 3, padding=1), nn.ConvTranspose1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 1, groups=2)]
    small = factorize(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), *layers), 0.25, skip=(), also="0")
    for parameter in small.parameters():
        parameter.data = parameter.data.bfloat16()
    assert small(torch.arange(8)[None]).dtype == torch.bfloat16
    assert all(part.weight.sum().dtype == torch.bfloat16 for part in small)


@pytest.mark.usefixtures("group")
def test_save_and_export_of_an_fsdp_model_equal_those_of_the_plain_one(tmp_path):
    start = factorize(build(), 0.25)
    sharded = deepcopy(start)
    with torch.no_grad():
        sharded[1].u.add_(1)
    expected = deepcopy(sharded)
    for part in (*sharded, sharded):
        fully_shard(part)
    save_factorized(sharded, tmp_path / "saved")
    assert_equal(load_factorized(tmp_path / "saved", build()), expected)
    export_lora(sharded, start, tmp_path / "pieces")
    export_lora(expected, start, tmp_path / "plain")
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("pieces", "plain")]
    assert files[0] == files[1]
    with pytest.raises(UserError, match="would be lost"), torch.no_grad():
        sharded[1].weight.data.zero_()
    for use in (merge, lambda model: merge(model, inplace=True), lambda model: factorize(model, 0.5)):
        with pytest.raises(UserError, match=r"FSDP2 holds 0\.(u|weight) in pieces, and its layer cannot be replaced"):
            use(sharded)
