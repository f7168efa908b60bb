"""Samples kept from the clients to tune on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sharding import UserError
from train.config.schema import load_config
from train.data import DATASETS, load_dataset
from train.data.dataset import hold_out
from train.experiment.assembly import assemble, read_dataset


def rows(inputs: torch.Tensor) -> list[bytes]:
    return sorted(row.numpy().tobytes() for row in inputs)


def test_hold_out_replaces_the_test_set_by_training_samples() -> None:
    digits = load_dataset("digits")
    dataset = hold_out(digits, 300, seed=0)
    assert len(dataset.test) == 300
    assert rows(torch.cat([dataset.train.inputs, dataset.test.inputs])) == rows(digits.train.inputs)
    assert not torch.equal(hold_out(digits, 300, seed=1).test.targets, dataset.test.targets)
    assert torch.equal(hold_out(digits, 300, seed=0).test.inputs, dataset.test.inputs)
    assert dataset.remarks == ("tested on 300 training samples kept from the clients",)
    with pytest.raises(UserError, match="holdout=1437 must be at most 1436, so that all clients of digits train"):
        hold_out(digits, len(digits.train), 0)


def test_hold_out_without_training_samples_raises() -> None:
    with pytest.raises(UserError, match="holdout=5 keeps training samples, and digits has none; name their files"):
        hold_out(load_dataset("digits").without_training(), 5, seed=0)


def test_hold_out_of_natural_clients_leaves_each_a_sample() -> None:
    digits = load_dataset("digits")
    owner = np.arange(len(digits.train)) % 7
    owner[:2] = 7  # a client that would often lose both
    natural = [np.flatnonzero(owner == client) for client in range(9)]  # the last has none
    marked = replace(digits, train=replace(digits.train, targets=torch.from_numpy(owner)), natural=natural)
    for seed in range(20):
        dataset = hold_out(marked, len(owner) - 100, seed)
        assert dataset.natural is not None
        assert sorted(np.concatenate(dataset.natural)) == list(range(100))
        kept = [set(dataset.train.targets[part].tolist()) for part in dataset.natural]
        assert kept == [*({client} for client in range(8)), set()]
    with pytest.raises(UserError, match="at most 1429, so that all clients"):
        hold_out(marked, len(owner) - 7, 0)


def test_holdout_in_a_configuration_replaces_the_test_set() -> None:
    config = load_config("configs/quickstart.yaml", ["data.holdout=200", "seed=3"])
    whole = load_config("configs/quickstart.yaml", [])
    experiment = assemble(config)
    assert len(experiment.dataset.test) == 200
    assert sum(experiment.clients.num_samples.values()) == len(read_dataset(whole).train) - 200


def test_hold_out_without_targets_raises(monkeypatch) -> None:
    digits = load_dataset("digits")
    unlabeled = replace(digits.train, targets=torch.full_like(digits.train.targets, digits.ignore_index))
    unlabeled.targets[0] = 1
    monkeypatch.setitem(DATASETS, "digits", lambda: replace(digits, train=unlabeled))
    with pytest.raises(UserError, match="has no target but ignored ones"):
        read_dataset(load_config("configs/quickstart.yaml", ["data.holdout=1"]))
