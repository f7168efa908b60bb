"""Letters between hosts: what was said comes out, whatever it is, and nothing else does."""

import json
import pickle

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from train.engines import letters
from train.engines.letters import Order, Parcel
from train.engines.post import Gloo, WorkerError
from train.engines.stacked import Bunch

CLIENT = st.one_of(st.integers(-(2**63), 2**63), st.text())
NUMBER = st.floats(allow_nan=False)
UPDATE = st.tuples(CLIENT, st.none() | st.binary(), st.none() | NUMBER, st.none() | st.text())
BUNCH = st.builds(Bunch, st.floats(0, 1), st.lists(CLIENT).map(tuple), st.integers(0))
ORDER = st.builds(Order, st.integers(0), NUMBER, st.lists(BUNCH), st.dictionaries(CLIENT, st.binary()), st.binary())
MESSAGE = st.one_of(st.none(), ORDER, st.builds(Parcel, st.lists(UPDATE), st.none() | st.text()))


@given(MESSAGE)
def test_a_letter_says_what_was_meant_bit_by_bit(message):
    assert letters.read(letters.write(message)) == message


@given(st.binary() | st.builds(lambda head: len(head).to_bytes(8, "little") + head, st.binary()))
def test_bytes_that_are_no_letter_are_told(data):
    with pytest.raises((ValueError, LookupError, TypeError, RecursionError)):
        letters.read(data)


@pytest.fixture
def post(monkeypatch):
    """What was sent, in order; what is received is the same."""
    sent = []
    monkeypatch.setattr(dist, "send", lambda tensor, peer: sent.append(tensor.clone()))
    monkeypatch.setattr(dist, "recv", lambda tensor, peer: tensor.copy_(sent.pop(0)))
    return sent


def test_between_hosts_go_tensors_and_no_pickles(post, monkeypatch):
    for name in ("dumps", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    order = Order(3, 0.1, [Bunch(0.2, (1, "b"), 4)], {1: b"one", "b": b"two"}, b"rest")
    Gloo(1).send(order)
    assert [str(tensor.dtype) for tensor in post] == ["torch.int64", "torch.uint8"]
    assert Gloo(1).receive() == order


@pytest.mark.parametrize(
    "head", [b"[]", b"{}", b'{"sizes": 3}', b'{"sizes": [], "updates": [1]}', b"[" * 100_000, b"x"]
)
def test_a_peer_that_says_something_else_is_told(post, monkeypatch, head):
    monkeypatch.setattr(letters, "write", lambda message: len(head).to_bytes(8, "little") + head)
    Gloo(1).send(None)
    with pytest.raises(WorkerError, match="worker 1 sent what cannot be read"):
        Gloo(1).receive()


def test_a_letter_without_shards_that_it_promises_is_told():
    text = json.dumps({"sizes": [], "updates": [[1, True, None, None]], "error": None}).encode()
    with pytest.raises(LookupError):
        letters.read(len(text).to_bytes(8, "little") + text)
