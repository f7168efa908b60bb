"""Synthetic(α, β): the published one, each client's classes by a logistic model of its own."""

import numpy as np
import pytest
import torch

from sharding import UserError
from sharding.rng import generator
from train.data import load_dataset
from train.data.quantity_skew import power_law_sizes


def test_synthetic_by_default_is_the_published_one():
    dataset = load_dataset("synthetic")
    sizes = np.array([len(rows) for rows in dataset.natural])
    assert len(dataset.train) + len(dataset.test) == 20_509
    assert len(dataset.train) / 20_509 == pytest.approx(0.9, abs=0.005)
    assert 100 * ((sizes / sizes.sum()) ** 2).sum() == pytest.approx(6.05, abs=0.1)
    assert np.concatenate(dataset.natural).tolist() == list(range(len(dataset.train)))
    assert (dataset.train.inputs.dtype, dataset.input_shape, dataset.num_classes) == (torch.float32, (60,), 10)


def test_synthetic_client_equals_the_papers_formula():
    rng = generator(5, "synthetic")
    sizes = power_law_sizes(300, 3, rng, 1.0)
    u, big_b = rng.normal(0, 0.5), rng.normal(0, 2.0)
    w, b, v = rng.normal(u, 1, (60, 10)), rng.normal(u, 1, 10), rng.normal(big_b, 1, 60)
    x = np.array([[rng.normal(v[j], (j + 1) ** -0.6) for j in range(60)] for _ in range(sizes[0])])
    dataset = load_dataset("synthetic", alpha=0.5, beta=2.0, clients=3, samples=300, seed=5)
    tenth, rows = sizes[0] // 10, dataset.natural[0]
    torch.testing.assert_close(dataset.test.inputs[:tenth], torch.from_numpy(x[:tenth]).float())
    torch.testing.assert_close(dataset.train.inputs[rows], torch.from_numpy(x[tenth:]).float())
    assert dataset.train.targets[rows].tolist() == (x[tenth:] @ w + b).argmax(1).tolist()


def test_synthetic_with_other_seeds_has_other_data():
    first, second, again = (load_dataset("synthetic", seed=seed).train.inputs for seed in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first[:5], second[:5])


@pytest.mark.parametrize(("key", "value"), [("alpha", -1.0), ("seed", -1), ("clients", 0), ("clients", 20_510)])
def test_synthetic_with_an_option_out_of_range_raises(key, value):
    with pytest.raises(UserError, match=f"{key}={value}"):
        load_dataset("synthetic", **{key: value})
