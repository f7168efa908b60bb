"""Make a random generator from a key that names its purpose.

A key such as ``(seed, "draw", round, client, layer)`` is hashed into the state of a counter-based generator. Two
draws never share a stream, and no draw depends on earlier ones: the order of the clients and the number of workers do
not matter.
"""

from hashlib import blake2b

import numpy as np

from sharding.errors import UserError, safe_repr

Key = int | str


def seed_of(*key: Key) -> int:
    """Hash a key to a 63-bit seed for `torch.Generator.manual_seed`."""
    return _digest(key) & (2**63 - 1)


def generator(*key: Key) -> np.random.Generator:
    """Return the NumPy generator of a key: the same key gives the same numbers on every machine."""
    return np.random.Generator(np.random.Philox(key=_digest(key)))


def _digest(key: tuple[object, ...]) -> int:
    # NumPy's numbers and strings are equal to Python's, and mean the same.
    key = tuple(part.item() if isinstance(part, np.generic) else part for part in key)
    if other := [part for part in key if not isinstance(part, int | str)]:  # what their `repr` says is not their value
        raise UserError(f"random numbers follow from whole numbers and names, not from {safe_repr(other[0])}; pass one")
    # `repr` distinguishes 1 from "1", and the tuple's commas keep ("ab", "c") apart from ("a", "bc").
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "little")
