"""Next-character prediction on the lines of 715 characters in Shakespeare's plays, one client each.

A snippet is what a character says in one go. It becomes BOS, one id per byte, EOS; it is padded to whole
chunks of 81 ids, and each chunk gives 80 inputs and the 80 ids that follow them, as in TensorFlow Federated's
`datasets.shakespeare` and in Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Appendix C.3.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Section 3.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sharding.errors import UserError
from train.data.dataset import EMPTY, Dataset, Split, default_root, reading

LENGTH = 80
CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
PAD = 0  # the characters have the ids 1…86
OOV, BOS, EOS = (len(CHARACTERS) + special for special in (1, 2, 3))
NUM_IDS = EOS + 1


def load_shakespeare(root: str | Path | None = None, *, length: int = LENGTH, share: float = 1.0) -> Dataset:
    """Load the two files of TFF's federated Shakespeare, `shakespeare_train.h5` and `shakespeare_test.h5`.

    Args:
        root: folder that holds them, or a folder `shakespeare` with them; by default `default_root()`.
        length: the length of the inputs of a chunk.
        share: the share of each client's chunks, the first of them and at least one.

    Returns:
        The clients in alphabetical order, each with its chunks in the order of the play; `natural` says whose
        are whose.

    Raises:
        UserError: the files are not there, or an option is out of its range.
    """
    if length < 1 or not 0 < share <= 1:
        raise UserError(f"shakespeare: length={length} must be at least 1, share={share} in (0, 1]")
    root = default_root() if root is None else Path(root)
    train, natural = _read(root, "shakespeare_train.h5", length, share)
    test, _ = _read(root, "shakespeare_test.h5", length, share)
    return replace(empty_shakespeare(length=length), train=train, test=test, natural=natural)


def empty_shakespeare(*, length: int = LENGTH, **_: object) -> Dataset:
    """Return the dataset without its samples."""
    return Dataset("shakespeare", EMPTY, EMPTY, NUM_IDS, input_shape=(length,), ignore_index=PAD)


def encode(snippets: Iterable[bytes], length: int = LENGTH) -> np.ndarray:
    """Turn snippets into chunks of ids, int64 (chunks, length + 1); no chunk mixes two snippets.

    A chunk that would hold nothing but an EOS to start from is left out: it has no id to predict.
    """
    table = np.full(256, OOV)
    table[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(1, len(CHARACTERS) + 1)
    rows = [np.empty((0, length + 1), dtype=np.int64)]  # a client may have no snippets
    for snippet in snippets:
        size = len(snippet) + 2
        ids = np.full(size + -size % (length + 1), PAD)
        ids[0], ids[size - 1] = BOS, EOS
        ids[1 : size - 1] = table[np.frombuffer(snippet, dtype=np.uint8)]
        rows.append(ids.reshape(-1, length + 1))
    chunks = np.concatenate(rows)
    return chunks[chunks[:, 1] != PAD]


def _read(root: Path, name: str, length: int, share: float) -> tuple[Split, list[np.ndarray]]:
    """Return all chunks of a file, and the indices of each client's."""
    import h5py  # noqa: PLC0415 - heavy

    file = next((path for path in (root / "shakespeare" / name, root / name) if path.exists()), None)
    if file is None:
        raise UserError(
            f"no shakespeare under {root.resolve()}: expected shakespeare/{name}, as published with "
            "TensorFlow Federated; set data.root=… to the folder that holds it"
        )
    with reading(file), h5py.File(file) as stored:
        clients = [encode(client["snippets"][()], length) for client in stored["examples"].values()]
    if not sum(map(len, clients)):
        raise UserError(f"{file} holds no snippets; replace it with a valid copy")
    clients = [chunks[: math.ceil(share * len(chunks))] for chunks in clients]
    ends = np.cumsum([len(chunks) for chunks in clients])
    ids = torch.from_numpy(np.concatenate(clients))
    split = Split(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return split, np.split(np.arange(ends[-1]), ends[:-1])
