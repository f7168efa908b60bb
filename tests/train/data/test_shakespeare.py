"""Shakespeare's ids, chunks and clients: by hand on small files, and the counts of the real ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sharding import UserError
from tests.drawn import write_plays
from train.data import empty_dataset, load_dataset
from train.data.shakespeare import BOS, CHARACTERS, EOS, LENGTH, NUM_IDS, OOV, PAD, encode


def test_shakespeare_ids_have_the_published_numbers() -> None:
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 86
    assert (PAD, OOV, BOS, EOS, NUM_IDS) == (0, 87, 88, 89, 90)
    assert [CHARACTERS.index(character) + 1 for character in "dh\r"] == [1, 2, 86]


def test_encode_of_a_short_snippet_is_one_padded_chunk() -> None:
    (chunk,) = encode([b"dh~"])  # the tilde is in no play
    assert chunk[:5].tolist() == [BOS, 1, 2, OOV, EOS]
    assert (chunk[5:] == PAD).all()
    assert len(chunk) == LENGTH + 1


@pytest.mark.parametrize(("length", "chunks"), [(0, 1), (79, 1), (80, 1), (81, 2), (160, 2), (161, 2), (162, 3)])
def test_encode_of_a_long_snippet_has_chunks_with_targets(length: int, chunks: int) -> None:
    """80 characters make 82 ids; the second chunk would be a lone EOS, with nothing to predict."""
    ids = encode([b"d" * length])
    assert len(ids) == chunks
    assert (ids[:, 1] != PAD).all()
    assert (ids == CHARACTERS.index("d") + 1).sum() == length


def test_shakespeare_natural_clients_have_their_chunks(tmp_path: Path) -> None:
    write_plays(tmp_path, {"B": [b"dd", b"hh"], "A": [b"l" * 100]})
    data = load_dataset("shakespeare", root=tmp_path)
    assert data.natural is not None
    assert [part.tolist() for part in data.natural] == [[0, 1], [2, 3]]  # A, then B
    assert data.train.inputs[0].tolist() == [BOS] + [CHARACTERS.index("l") + 1] * 79
    assert torch.equal(data.train.inputs[:, 1:], data.train.targets[:, :-1])
    assert data.train.targets[2, :4].tolist() == [1, 1, EOS, PAD]


def test_shakespeare_with_length_and_share_cuts_chunks_and_clients(tmp_path: Path) -> None:
    write_plays(tmp_path, {"A": [b"dhlptx" * 4], "B": [b"d"]})  # 26 ids are 5 chunks of 6
    whole = load_dataset("shakespeare", root=tmp_path, length=5)
    part = load_dataset("shakespeare", root=tmp_path, length=5, share=0.5)
    assert whole.input_shape == empty_dataset("shakespeare", length=5, share=0.5).input_shape == (5,)
    assert whole.train.inputs[0].tolist() == [BOS, 1, 2, 3, 4]
    assert [len(client) for client in whole.natural or []] == [5, 1]
    assert [len(client) for client in part.natural or []] == [3, 1]
    assert torch.equal(part.train.inputs, whole.train.inputs[[0, 1, 2, 5]])
    assert torch.equal(part.test.inputs, whole.test.inputs[[0, 1, 2, 5]])


@pytest.mark.parametrize("option", [{"length": 0}, {"share": 0.0}, {"share": 1.5}])
def test_shakespeare_with_options_out_of_range_raises(tmp_path: Path, option: dict[str, float]) -> None:
    with pytest.raises(UserError, match="shakespeare: length="):
        load_dataset("shakespeare", root=tmp_path, **option)


@pytest.mark.real
def test_real_shakespeare_has_the_published_counts(real_data: Callable[..., Path]) -> None:
    data = load_dataset("shakespeare", root=real_data("shakespeare"))
    starts = [int((split.inputs == BOS).sum()) for split in (data.train, data.test)]
    assert starts == [16_068, 2_356]  # one BOS a snippet
    assert (data.train.inputs[:, 0] != PAD).all()
    assert (data.train.targets[:, 0] != PAD).all()
    assert int(data.train.targets.max()) == EOS
    assert data.natural is not None
    assert len(data.natural) == 715
    assert np.array_equal(np.concatenate(data.natural), np.arange(len(data.train)))
    assert min(len(part) for part in data.natural) >= 1
    assert (data.num_classes, data.input_shape, data.ignore_index) == (90, (80,), 0)
    adam = data.train.inputs[data.natural[0][0]]
    text = "".join(CHARACTERS[token - 1] for token in adam.tolist() if 1 <= token <= 86)
    assert text == "Yonder comes my master, your brother."
