"""Messages as a hostile machine would write them, and the bounds within which they are read."""

import json
import time
import tracemalloc
from contextlib import contextmanager

import safetensors.torch
import torch
from hypothesis import strategies as st

from sharding.rounds.codec import ROLES

SIDES = [0, 1, 2, 2**31, 2**40, 2**62, 2**63, 10**18, -1, 0.5, None, "a", [0], True]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(SIDES),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(max_size=3), value, max_size=3),
    max_leaves=6,
)
SHAPES = st.lists(st.sampled_from(SIDES), max_size=4) | st.just([10**18] * 100_000) | VALUES

TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.int32, torch.int8]
PARTS = [f"terms/a/{part}" for part in (*ROLES, "w")]
NAMES = [
    *PARTS,
    "tail/a/terms",
    "dense/a",
    "layers/a",
    *(f"{kind}{name}" for kind in ("frozen/", "scales/") for name in PARTS),
]


def tensors(types=TYPES):
    """Tensors of at most three dimensions, also empty ones."""
    sides = st.lists(st.integers(0, 2), max_size=3)
    return st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), sides, st.sampled_from(types))


FLOATS, INDICES = tensors([torch.float32]), tensors([torch.int64, torch.int32])
FIELDS = st.fixed_dictionaries(
    {"keep_ratio": st.just(0.5) | VALUES, "plan": st.just("0-0") | VALUES},
    optional={key: st.sampled_from(["int8", "bfloat16"]) | VALUES for key in ("wire", "diff", "residual", "clip")},
)
PLAIN = json.dumps({"keep_ratio": 0.5, "plan": "0-0"})
TEXTS = st.just(PLAIN) | FIELDS.map(json.dumps) | VALUES.map(json.dumps) | st.just("[" * 100_000)


def joined(header: object, body: bytes = b"") -> bytes:
    """A file of this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def files():
    """Valid files of any tensors, and files of any header."""
    named = st.dictionaries(st.sampled_from(NAMES), tensors(), max_size=6)
    whole = st.fixed_dictionaries(dict.fromkeys(PARTS[:-1], FLOATS) | {"terms/a/indices": INDICES})
    metadata = st.fixed_dictionaries({"shard": TEXTS}, optional={"residual": st.text(max_size=3)})
    entry = st.fixed_dictionaries(
        {"dtype": st.sampled_from(["F32", "I64", "?"]), "shape": SHAPES, "data_offsets": st.just([0, 0]) | VALUES}
    )
    header = st.fixed_dictionaries(
        {"__metadata__": metadata | st.none() | VALUES}, optional={"dense/a": entry, "layers/a": entry}
    )
    return st.builds(safetensors.torch.save, named | whole, metadata) | (header | VALUES).map(joined)


@contextmanager
def bounded(num_bytes=2**25, seconds=5.0):
    """Check what is done in between: the memory that Python and NumPy ask for, and the processor's time."""
    begin = time.process_time()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()
    assert time.process_time() < begin + seconds
