"""Preparation on the device, the embedded digits, and the registry."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding import UserError
from train.data import DATASETS, load_dataset
from train.data.dataset import EMPTY, Dataset, Split, checked, flip, standardize


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 8, 8), (3, 4, 6)]))
def test_standardized_images_have_zero_mean_and_unit_deviation(seed: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (2, 3, *shape), generator=generator, dtype=torch.uint8)
    ready = standardize(images)
    assert ready.dtype == torch.float32
    assert ready.shape == images.shape
    flat = ready.flatten(-3)
    torch.testing.assert_close(flat.mean(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(flat.std(-1, correction=0), torch.ones(2, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(standardize(images[1, 2]), ready[1, 2])  # each image by itself


def test_standardize_of_a_constant_image_is_zero() -> None:
    assert torch.equal(standardize(torch.full((1, 3, 2, 2), 7, dtype=torch.uint8)), torch.zeros(1, 3, 2, 2))


def test_flip_draws_each_image_by_the_generator() -> None:
    images = torch.arange(400 * 3 * 2 * 5).reshape(2, 200, 3, 2, 5)
    flipped = flip(images, torch.Generator().manual_seed(0))
    mirrored = (flipped == images.flip(-1)).flatten(2).all(-1)
    kept = (flipped == images).flatten(2).all(-1)
    assert torch.equal(mirrored, ~kept)
    assert 150 < mirrored.sum() < 250  # 200 ± 5 standard deviations
    assert torch.equal(flipped, flip(images, torch.Generator().manual_seed(0)))
    assert not torch.equal(flipped, flip(images, torch.Generator().manual_seed(1)))


def test_load_digits_splits_by_class_and_scales_to_bytes() -> None:
    from sklearn.datasets import load_digits as published

    digits = load_dataset("digits")
    assert digits.train.inputs.shape == (1437, 1, 8, 8)
    assert digits.test.inputs.shape == (360, 1, 8, 8)
    assert digits.train.inputs.dtype == torch.uint8
    together = torch.cat([digits.train.inputs, digits.test.inputs]).flatten(1).numpy() * (16 / 255)
    inks = published().data
    assert sorted(map(bytes, together.round().astype(np.uint8))) == sorted(map(bytes, inks.astype(np.uint8)))
    shares = [torch.bincount(split.targets, minlength=10) for split in (digits.train, digits.test)]
    assert (shares[1] - shares[0] / 4).abs().max() <= 1.25
    assert torch.equal(digits.train.inputs, load_dataset("digits").train.inputs)


def test_data_root_is_data_or_that_of_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHARDING_DATA", raising=False)
    with pytest.raises(UserError, match=f"no cifar10 under {tmp_path}/data: "):
        load_dataset("cifar10")
    monkeypatch.setenv("SHARDING_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=f"no shakespeare under {tmp_path}/elsewhere: "):
        load_dataset("shakespeare")
    with pytest.raises(UserError, match=f"no mnist under {tmp_path}/given: "):
        load_dataset("mnist", root=tmp_path / "given")


SAMPLES = Split(torch.randn(6, 3), torch.arange(6) % 2)
MISTAKES = {  # of the training split, and what the line says
    "too few targets": (Split(SAMPLES.inputs, SAMPLES.targets[:4]), "has 6 inputs and 4 targets"),
    "another shape": (Split(torch.randn(6, 4), SAMPLES.targets), r"shape \(4,\), and its input_shape is \(3,\)"),
    "float64": (Split(SAMPLES.inputs.double(), SAMPLES.targets), "inputs in torch.float64; convert them"),
    "int32": (Split(SAMPLES.inputs, SAMPLES.targets.int()), "targets in torch.int32; convert them to int64"),
    "one-hot": (Split(SAMPLES.inputs, torch.eye(2)[SAMPLES.targets].long()), r"targets of shape \(6, 2\)"),
    "from 1": (Split(SAMPLES.inputs, SAMPLES.targets + 1), "the targets 2; with num_classes=2 they are 0 to 1"),
    "NumPy": (Split(SAMPLES.inputs.numpy(), SAMPLES.targets), "is no Split of two dense tensors"),
    "a pair": ((SAMPLES.inputs, SAMPLES.targets), "is no Split of two dense tensors"),
    "sparse": (Split(SAMPLES.inputs.to_sparse(), SAMPLES.targets), "is no Split of two dense tensors"),
    "ignored only": (Split(SAMPLES.inputs, torch.full((6,), -100)), "no target but ignored ones; ignore_index=-100"),
    "below 0": (Split(SAMPLES.inputs, SAMPLES.targets - 1), "the targets -1; "),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_custom_dataset_that_is_invalid_is_refused(what, monkeypatch) -> None:
    split, reason = MISTAKES[what]
    for name, splits in (("training", (split, SAMPLES)), ("test", (SAMPLES, split))):
        monkeypatch.setitem(DATASETS, "own", lambda splits=splits: Dataset("own", *splits, 2, (3,)))
        with pytest.raises(UserError, match=f"the {name} split of the dataset own .*{reason}"):
            load_dataset("own")


def test_checked_of_another_type_than_a_dataset_raises() -> None:
    with pytest.raises(UserError, match=r"returned \(Split.*; a train.data.Dataset is needed"):
        checked((SAMPLES, SAMPLES))


@pytest.mark.parametrize("classes", [2.5, "2", 0, True, torch.tensor(2)])
def test_dataset_with_a_non_integer_number_of_classes_raises(classes) -> None:
    with pytest.raises(UserError, match=r"num_classes of the dataset own is .*; a whole number of at least 1"):
        checked(Dataset("own", SAMPLES, SAMPLES, classes, (3,)))
    assert type(checked(Dataset("own", SAMPLES, SAMPLES, np.int64(2), (3,))).num_classes) is int


def test_dataset_without_test_samples_raises() -> None:
    with pytest.raises(UserError, match="own has no test samples"):
        checked(Dataset("own", SAMPLES, EMPTY, 2, (3,)))
