"""What one node sends ends neither the server nor its memory."""

import json
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy
from safetensors.torch import save

from sharding import Shard, Update, UserError
from sharding.flower.messages import REST, SHAPES, unpack
from sharding.rounds.failures import Kind
from tests.sharding import forged
from tests.sharding.flower.test_strategy import _identity, grid_of, run, server_of, train, trained  # noqa: F401

FIELDS = json.dumps({"keep_ratio": 0.5, "plan": "0-0"})
VALID = save({"terms/a/indices": torch.tensor([0]), "terms/a/multipliers": torch.ones(1)}, {"shard": FIELDS})
LAYOUT = {"terms/a/u": [2, 1], "terms/a/v": [2, 1]}


def announced(shape, dtype="<f4", body=bytes(16)):
    """An array with a header of this shape, whatever its body."""
    stream = BytesIO()
    npy.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return Array("float32", (4,), "numpy.ndarray", stream.getvalue() + body)


ARRAYS = (
    st.builds(announced, st.lists(st.sampled_from([4, 0, 10**9, 10**15]), max_size=2).map(tuple))
    | st.builds(announced, st.just((4,)), st.sampled_from([">f4", "<c8", "|V1000000000", "<U1000000000", "|O"]))
    | st.binary(max_size=9).map(lambda data: Array("float32", (4,), "numpy.ndarray", data))
    | st.just(Array(np.zeros(4, np.float32)))
)
LAYOUTS = st.dictionaries(st.sampled_from([*LAYOUT, "dense/a"]), forged.SHAPES, max_size=3) | st.just(LAYOUT)
GROUPS = st.sampled_from(["float32", "float64", "int8", "packed", "V1000000000"])


@given(
    arrays=st.dictionaries(GROUPS, ARRAYS, max_size=2),
    shapes=st.dictionaries(GROUPS, LAYOUTS, max_size=2).map(json.dumps) | forged.TEXTS | st.just("9" * 2**23),
    rest=st.just(VALID) | forged.files(),
)
@settings(max_examples=100)
@pytest.mark.parametrize("kind", [Shard, Update])
def test_unpack_of_forged_content_reads_or_raises_within_bounds(kind, arrays, shapes, rest):
    content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({REST: rest, SHAPES: shapes})})
    with forged.bounded(), suppress(UserError):
        assert isinstance(unpack(kind, content), kind)


@pytest.mark.parametrize(
    "shape", [[100_000_000, [0]], [100_000_000, "a"], [10**18] * 100_000, [2**40, 2**40], [True, 4]]
)
def test_shape_that_is_no_short_list_of_lengths_costs_nothing(shape):
    config = ConfigRecord({REST: VALID, SHAPES: json.dumps({"float32": {"terms/a/u": shape}})})
    content = RecordDict({"arrays": ArrayRecord({"float32": Array(np.zeros(4, np.float32))}), "config": config})
    with forged.bounded(), pytest.raises(UserError, match="do not fit their names and shapes"):
        unpack(Update, content)


def test_array_that_announces_gigabytes_costs_nothing():
    config = ConfigRecord({REST: VALID, SHAPES: json.dumps({"float32": LAYOUT})})
    with forged.bounded(), pytest.raises(UserError, match=r"of shape \(1000000000,\), not float32 of \(4,\)"):
        unpack(Update, RecordDict({"arrays": ArrayRecord({"float32": announced((10**9,))}), "config": config}))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, RecursionError, AttributeError])
def test_any_error_of_reading_is_of_one_node_only(monkeypatch, error):
    read = iter([unpack, None, unpack])

    def fails_once(kind, content):
        if (function := next(read)) is None:
            raise error("diff expects input to be\nat least one-dimensional")
        return function(kind, content)

    monkeypatch.setattr("sharding.flower.strategy.unpack", fails_once)
    strategy, _, _ = run(server_of(), rounds=1)
    ((client, failure),) = strategy.failures[1].items()
    assert (client, failure.kind) == (1, Kind.MALFORMED)
    assert str(failure) == f"{error.__name__}: diff expects input to be at least one-dimensional"


def test_any_error_of_reading_a_report_leaves_that_node_out(monkeypatch, caplog):
    def fails(self, id, values):
        if id == 999:
            raise TypeError("unhashable type: 'list'")
        return admit(self, id, values)

    admit = run.__globals__["Nodes"].admit
    monkeypatch.setattr("sharding.flower.nodes.Nodes.admit", fails)
    _, _, grid = run(server_of(), rounds=1)
    assert "node 999 is left out: TypeError: unhashable type: 'list'" in caplog.text
    assert {*trained(grid)} == {1000, 998}


def test_error_without_a_reason_is_of_one_node_only():
    def unexplained(reply):
        if reply.metadata.message_type == "train":
            reply.__dict__.update(_content=None, _error=Error(7))
        return [reply]

    grid = grid_of(train)
    grid.bend[999] = unexplained
    strategy, _, _ = run(server_of(), grid, rounds=1)
    assert {client: str(failure) for client, failure in strategy.failures[1].items()} == {1: "error 7: None"}
