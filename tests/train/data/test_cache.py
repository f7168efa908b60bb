"""Decoded images are kept under a name that follows from the files; a spoiled cache is not believed."""

import pytest
import torch

from train.data.cache import FEW, cached

ENCODED = [bytes([place % 251, place // 251]) for place in range(FEW)]
IMAGES = torch.arange(FEW * 12).reshape(FEW, 3, 2, 2).to(torch.uint8)


class Decoder:
    calls = 0

    def __call__(self):
        self.calls += 1
        return IMAGES.clone()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_second_time_nothing_is_decoded(folder):
    decode = Decoder()
    assert torch.equal(cached(ENCODED, "RGB", decode), IMAGES)
    assert torch.equal(cached(ENCODED, "RGB", decode), IMAGES)
    assert decode.calls == 1
    assert [path.suffix for path in folder.iterdir()] == [".npy"]


def test_other_files_and_other_ways_are_other_images(folder):
    decode = Decoder()
    pushed = [ENCODED[0] + ENCODED[1][:1], ENCODED[1][1:], *ENCODED[2:]]  # the same bytes, cut elsewhere
    for encoded, how in ((ENCODED, "RGB"), (ENCODED, "L"), ([*ENCODED[:-1], b"?"], "RGB"), (pushed, "RGB")):
        cached(encoded, how, decode)
    assert decode.calls == 4


@pytest.mark.parametrize("content", [b"", b"no array", None])
def test_a_spoiled_file_is_made_again(folder, content):
    decode = Decoder()
    cached(ENCODED, "RGB", decode)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    assert torch.equal(cached(ENCODED, "RGB", decode), IMAGES)
    cached(ENCODED, "RGB", decode)
    assert decode.calls == 2


def test_where_it_cannot_be_written_images_are_decoded_each_time(folder):
    folder.write_text("a file is in the way")
    decode = Decoder()
    for _ in range(2):
        assert torch.equal(cached(ENCODED, "RGB", decode), IMAGES)
    assert decode.calls == 2


def test_a_few_images_are_not_kept(folder):
    cached(ENCODED[:-1], "RGB", Decoder())
    assert not folder.exists()
