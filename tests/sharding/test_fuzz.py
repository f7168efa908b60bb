"""Arbitrary bytes as an update: a `UserError`, or an update that leaves the server's model finite."""

import json
import re
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save

from sharding import COMPRESSIONS, Server, Shard, ShardPlanner, Update, UserError
from sharding.rounds.frozen import Frozen
from sharding.transport.serialize import LONGEST_HEADER
from tests.sharding.forged import bounded, files, joined
from tests.sharding.models import make_net, perturbed

WORDS = ["I64", "F64", "F32", "F16", "BF16", "BOOL", "C64", "U8", "F8_E4M3", "F4", "?", "", "u", "terms/1/u", "dense/x"]
NUMBERS = [0, 1, -1, 2, 7, 8, 2**31, 2**63 - 1, 2**64, -(2**63), 10**30, 0.5, None, True, [], {}, "1"]


def make_round(wire):
    model = make_net()
    plan = ShardPlanner("unbiased", compression=wire).plan(model, {"a": 0.4, "b": 0.4})
    return model, plan, {client: perturbed(shard, 1) for client, shard in plan.shards()}


def text_of(data: bytes) -> tuple[str, bytes]:
    """Header as text, and body."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end].decode(), data[end:]


def split(data: bytes) -> tuple[dict, bytes]:
    """Header and body."""
    text, body = text_of(data)
    return json.loads(text), body


def with_other_header(data: bytes, rng: np.random.Generator) -> bytes:
    """A word or number of the header becomes another one, of the header or an odd one, or it goes."""
    text, body = text_of(data)
    tokens = list(re.finditer(r'"[^"]*"|-?\d+', text))
    others = ["", *map(json.dumps, WORDS + NUMBERS), *(token.group() for token in tokens)]
    start, end = tokens[rng.integers(len(tokens))].span()
    header = f"{text[:start]}{others[rng.integers(len(others))]}{text[end:]}".encode()
    return len(header).to_bytes(8, "little") + header + body


def with_flipped_bits(data: bytes, rng: np.random.Generator) -> bytes:
    corrupted = bytearray(data)
    for index in rng.integers(len(data) if rng.random() < 0.5 else 2000, size=rng.integers(1, 6)):
        corrupted[index] ^= 1 << rng.integers(8)
    return bytes(corrupted)


def with_other_values(data: bytes, rng: np.random.Generator) -> bytes:
    header, body = split(data)
    start = int(rng.integers(len(body)))
    return joined(header, body[:start] + rng.bytes(min(64, len(body) - start)) + body[start + 64 :])


def with_other_length(data: bytes, rng: np.random.Generator) -> bytes:
    lengths = [0, 1, 7, 2**20, 2**31, 2**40, 2**63, 2**64 - 1]
    return lengths[rng.integers(len(lengths))].to_bytes(8, "little") + data[8:]


CHANGES = [
    with_other_header,
    with_flipped_bits,
    with_other_values,
    with_other_length,
    lambda data, rng: data[: rng.integers(len(data))],
    lambda data, rng: data + rng.bytes(rng.integers(1, 20)),
    lambda data, rng: rng.bytes(rng.integers(200)),
]
ODDS = np.array([8, 4, 3, 0.5, 1, 0.5, 1])


def read(data: bytes) -> Update | str:
    """Return the update or the error's message."""
    try:
        return Update.from_bytes(data)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("wire", COMPRESSIONS)
@pytest.mark.parametrize("cases", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_from_bytes_of_corrupted_updates_raises_or_leaves_the_server_finite(wire, cases):
    model, plan, updates = make_round(wire)
    server, state = Server(model, ShardPlanner("unbiased", compression=wire)), model.state_dict()
    rng, data = np.random.default_rng(cases), updates["a"].to_bytes()
    refused = rejected = 0
    for _ in range(cases):
        corrupted = CHANGES[rng.choice(len(CHANGES), p=ODDS / ODDS.sum())](data, rng)
        update = read(corrupted)
        if isinstance(update, str):
            assert re.search("not a client's update|were returned", update)
            assert "\n" not in update
            refused += 1
            continue
        average = server.average(plan, {"a": 1, "b": 1})
        for client, sent in {"a": update, "b": updates["b"]}.items():
            average.add(client, sent)
        delta, outcome = average.finish()
        rejected += "a" in outcome.rejected
        assert all((state[name] + change).isfinite().all() for name, change in delta.items())
    assert refused > cases / 3
    assert rejected > cases / 100
    assert refused + rejected < cases  # other values are taken: nobody can tell


def test_from_bytes_of_a_long_header_raises():
    header = {f"dense/{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(65_000)}
    data = joined(header, b"")
    assert len(data) > LONGEST_HEADER
    with pytest.raises(UserError, match=rf"a header of {len(data) - 8} bytes, and more than {LONGEST_HEADER} are not"):
        Shard.from_bytes(data)


def edited(data: bytes, edit) -> bytes:
    header, body = split(data)
    edit(header)
    return joined(header, body)


def renamed(old: str, new: str):
    def edit(header):
        header[new] = header.pop(old)

    return edit


OF_INT7 = '{"keep_ratio": 0.5, "plan": "", "wire": "int7"}'
WRONG = {
    "nothing": (lambda data: b"", "these 0 bytes are not a shard"),
    "text": (lambda data: "text", "a str is not a shard"),
    "no metadata": (
        lambda data: edited(data, lambda h: h.pop("__metadata__")),
        "these .* bytes are not a shard: KeyError",
    ),
    "no words": (lambda data: edited(data, lambda h: h["__metadata__"].clear()), "no keep ratio and plan"),
    "a part missing": (lambda data: edited(data, renamed("terms/1/u", "dense/u")), "it lacks 'u' of layer '1'"),
    "an unknown part": (lambda data: edited(data, renamed("terms/1/u", "terms/1/w")), "it lacks 'u' of layer"),
    "an unknown kind": (
        lambda data: edited(data, renamed("dense/0.bias", "rest/0.bias")),
        "unknown entry .rest/0.bias.",
    ),
    "twice": (
        lambda data: edited(data, renamed("dense/7.bias", "frozen/dense/0.bias")),
        "unknown entry .(frozen/)?dense/0",
    ),
    "keep ratio": (
        lambda data: edited(data, lambda h: h["__metadata__"].update(shard='{"keep_ratio": 2.0, "plan": ""}')),
        "its metadata has {'keep_ratio': 2.0",
    ),
    "another wire": (
        lambda data: edited(data, lambda h: h["__metadata__"].update(shard=OF_INT7)),
        "its numbers are in 'int7', not in one of float32, bfloat16, int8",
    ),
    "deep": (
        lambda data: edited(data, lambda h: h["__metadata__"].update(shard="[" * 100_000)),
        "no keep ratio and plan",
    ),
}


@pytest.mark.parametrize(("corrupt", "message"), WRONG.values(), ids=WRONG.keys())
def test_from_bytes_of_an_invalid_shard_raises_with_the_reason(corrupt, message):
    _, _, updates = make_round("float32")
    with pytest.raises(UserError, match=message):
        Shard.from_bytes(corrupt(updates["a"].to_bytes()))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_from_bytes_of_any_buffer_type_reads_the_shard(kind):
    _, _, updates = make_round("float32")
    shard = Shard.from_bytes(kind(updates["a"].to_bytes()))
    assert torch.equal(shard.terms["1"].u, updates["a"].terms["1"].u)


def test_read_of_an_invalid_or_missing_file_raises_with_its_path(tmp_path):
    (tmp_path / "file").write_bytes(b"no shard at all")
    with pytest.raises(UserError, match=r"file is not a shard"):
        Shard.read(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot read the shard .*nowhere: No such file"):
        Shard.read(tmp_path / "nowhere")


@given(data=files())
@settings(max_examples=150)
@pytest.mark.parametrize("kind", [Shard, Update, Frozen])
def test_from_bytes_of_forged_files_reads_or_raises_within_bounds(kind, data):
    with bounded(), suppress(UserError):
        assert isinstance(kind.from_bytes(data), kind)


def test_update_with_indices_that_are_no_vector_is_refused():
    terms = {"indices": torch.tensor(0), "u": torch.zeros(2, 1), "v": torch.zeros(2, 1), "multipliers": torch.ones(1)}
    metadata = {"shard": json.dumps({"keep_ratio": 0.5, "plan": "0-0"})}
    with pytest.raises(UserError, match=r"layer 'a' has indices int64\[\]"):
        Update.from_bytes(save({f"terms/a/{part}": tensor for part, tensor in terms.items()}, metadata))


@pytest.mark.parametrize("metadata", [None, [], {"residual": None}, {"residual": 1}])
def test_frozen_part_with_metadata_that_are_no_texts_is_refused(metadata):
    with pytest.raises(UserError, match="not a frozen part: "):
        Frozen.from_bytes(joined({"__metadata__": metadata}))
