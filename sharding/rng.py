"""All randomness comes from generators keyed by what they are for.

A key such as ``(seed, "draw", round, client, layer)`` is hashed into the state of a counter-based generator. Two
draws never share a stream, and a draw does not depend on what was drawn before it: not on the order of the clients,
nor on the number of workers.
"""

from hashlib import blake2b

import numpy as np

Key = int | str


def seed_of(*key: Key) -> int:
    """Hash a key to a 63-bit seed (what `torch.Generator.manual_seed` takes)."""
    return _digest(key) & (2**63 - 1)


def generator(*key: Key) -> np.random.Generator:
    """Return the NumPy generator of a key: the same key, the same numbers, on every machine."""
    return np.random.Generator(np.random.Philox(key=_digest(key)))


def _digest(key: tuple[Key, ...]) -> int:
    # NumPy's numbers and strings are equal to Python's, and mean the same.
    key = tuple(part.item() if isinstance(part, np.generic) else part for part in key)
    # `repr` tells 1 from "1", and the tuple's commas keep ("ab", "c") apart from ("a", "bc").
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "little")
