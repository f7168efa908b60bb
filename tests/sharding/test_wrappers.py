"""Shards, clipping, decay and aggregation on models inside DDP, torch.compile and FSDP2."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import spawn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sharding import LocalSGD, Shard, ShardPlanner, UserError, client_model, factorize, load_factorized, save_factorized
from sharding.optim import factorized_layers, frobenius_decay
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
def test_a_wrapper_is_looked_into(wrap):
    server, plain = build(), build()
    plan = make_plan(wrap(server), {0: 0.5}, "unbiased")
    assert plan[0].to_bytes() == make_plan(plain, {0: 0.5}, "unbiased")[0].to_bytes()
    client = client_model(wrap(build()), plan[0])
    with torch.no_grad():
        client[1].u.zero_()
    plan[0].load_into(wrap(client))
    assert_same(plan[0].read_from(wrap(client)), plan[0])
    assert factorized_layers(wrap(client)) == factorized_layers(client)
    update = deepcopy(plan[0])
    update.dense["0.bias"].add_(1)
    for model in (wrap(server), plain):
        assert aggregate(model, plan, {0: update}, {0: 1}).accepted == [0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(server.parameters(), plain.parameters(), strict=True))
    torch.testing.assert_close(server[0].bias, build()[0].bias + 1)


def round_of_training(model: nn.Module, shard: Shard) -> Shard:
    """Train two steps; every process takes its half of the batch, if there are several."""
    shard.load_into(model)
    optimizer = LocalSGD(model, 0.1, frobenius_decay=0.01, clip=1.5)
    rng = torch.Generator().manual_seed(0)
    for _ in range(2):
        inputs, targets = torch.randn(8, 8, generator=rng), torch.randint(8, (8,), generator=rng)
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
            inputs, targets = inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank]
        optimizer.step(F.cross_entropy(model(inputs), targets))
    return shard.read_from(model)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(2, 8))])
def test_a_scripted_model_is_refused(script, tmp_path):
    model, scripted = build(), script(build())
    save_factorized(factorize(model, 0.25), tmp_path)
    for use in (
        lambda: factorize(scripted, 0.25),
        lambda: factorize(nn.Sequential(nn.Linear(8, 8), scripted), 0.25),
        lambda: ShardPlanner().plan(scripted, {0: 0.5}),
        lambda: client_model(scripted, make_plan(model, {0: 0.5})[0]),
        lambda: load_factorized(tmp_path, scripted),
    ):
        with pytest.raises(UserError, match="the layers of a scripted or traced model cannot be replaced"):
            use()


def train_in_pieces(rank: int, ranks: int, store: str, shard: Shard, expected: Shard, decay: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        model = client_model(build(), shard)
        for part in (*model, model):
            fully_shard(part)
        assert isinstance(model[1].u, DTensor)
        shard.load_into(model)
        torch.testing.assert_close(frobenius_decay(factorized_layers(model)).item(), decay, rtol=1e-5, atol=0)
        returned = round_of_training(model, shard)
        torch.testing.assert_close(returned.trained(), expected.trained(), rtol=1e-4, atol=1e-6)
        server, plain = fully_shard(build()), build()
        plan = ShardPlanner("unbiased").plan(server, {0: 0.5})
        assert plan[0].to_bytes() == shard.to_bytes()
        for model, rate in ((server, 0.5), (plain, 0.5)):
            assert aggregate(model, plan, {0: expected}, {0: 1}, server_lr=rate).accepted == [0]
        for mine, theirs in zip(server.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)
        dist.barrier()  # a rank that leaves while another still computes may end by SIGABRT
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_client_whose_model_fsdp_holds_in_pieces_trains_as_any(ranks, tmp_path):
    shard = ShardPlanner("unbiased").plan(build(), {0: 0.5})[0]
    model = client_model(build(), shard)
    decay = frobenius_decay(factorized_layers(model)).item()
    expected = round_of_training(model, shard)
    arguments = (ranks, f"{tmp_path}/store", shard, expected, decay)
    if ranks == 1:
        train_in_pieces(0, *arguments)
    else:
        spawn(train_in_pieces, arguments, ranks)
