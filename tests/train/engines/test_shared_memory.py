"""Messages in shared memory: every value, type and shape comes out as it went in, whatever was there before."""

import os
from dataclasses import replace

import pytest
import torch

from sharding import Shard, ShardPlanner, Update
from sharding.rounds.codec import Terms
from tests.train.engines.jobs import RATIOS, make_job
from train.engines.shared_memory import ALIGNMENT, SharedMemory, put, room, take

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)


@pytest.fixture
def memory(tmp_path):
    memory, path = SharedMemory.create(tmp_path)
    other = SharedMemory(os.open(path, os.O_RDWR))
    yield memory, other
    memory.close()
    other.close()


@pytest.fixture(params=["memory", "folder"])
def without_memfd(request, monkeypatch):
    if request.param == "folder":
        monkeypatch.delattr(os, "memfd_create", raising=False)


@pytest.mark.usefixtures("without_memfd")
def test_message_of_any_types_and_shapes_crosses_shared_memory(memory):
    ours, theirs = memory
    shapes = ((3, 5), (), (0, 4), (7,))
    whole = {f"{t}{s}": torch.ones(s).mul(3).to(t) for t in TYPES for s in shapes}
    whole["strided"] = torch.arange(12.0).view(3, 4).T
    shard = Shard(
        {"a": Terms(torch.tensor([1, 4]), torch.rand(3, 2), torch.rand(5, 2), torch.rand(2))}, whole, clip=None
    )
    shard = replace(shard, tail={"a": torch.arange(9, dtype=torch.uint8)}, plan_id="0-a", fixed=frozenset(["a"]))
    size = room(shard)
    rest = put(shard, ours.slot(2, size))
    assert take(rest, theirs.slot(2, size)).to_bytes() == shard.to_bytes()


def test_slots_hold_one_message_each_and_grow(memory):
    ours, theirs = memory
    update = Update({}, {"a": torch.zeros(3)})
    small, large = room(update), room(replace(update, whole={"a": torch.zeros(1000)}))
    assert (small, large) == (ALIGNMENT, 4032)
    rests = [put(replace(update, whole={"a": torch.full((3,), float(k))}), ours.slot(k, small)) for k in range(5)]
    ours.slot(4, large).fill_(255)
    assert [take(rest, theirs.slot(k, small)).whole["a"].tolist() for k, rest in enumerate(rests)] == [
        [float(k)] * 3 for k in range(5)
    ]
    assert int(theirs.slot(4, large).min()) == 255


@pytest.mark.parametrize("compression", ["float32", "int8"])
def test_room_of_a_template_holds_the_shard_and_its_update(compression):
    plan = ShardPlanner("collective", compression=compression).plan(make_job().model, dict(enumerate(RATIOS)), 0)
    for client, shard in plan.shards():
        size = room(plan.template(client))
        assert size >= room(shard)
        assert size >= room(shard.returned(shard.trained()))
