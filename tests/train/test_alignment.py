"""The measurement of each round's update against FedAvg's."""

from math import isnan

import pytest
import torch

from sharding.rounds.diagnostics import alignment
from tests.train.runs import RESNET, read, tiny, without_times
from train.run import run

UNEVEN = "data.partition=power_law"
LONG_STEPS = "local.optimizer.lr=0.1"  # so that what a client misses shows in two rounds


def aligned(directory, *overrides):
    return read(run(tiny(directory, "alignment=true", *overrides, shared=RESNET)))


def test_alignment_of_updates_is_their_cosine():
    update = torch.tensor([3.0, 4.0])
    assert alignment(update, 5 * update) == pytest.approx(1, abs=1e-15)
    assert alignment(update, -update) == pytest.approx(-1, abs=1e-15)
    assert alignment(update, torch.tensor([1.0, 0.0])) == pytest.approx(0.6, abs=1e-15)
    assert isnan(alignment(update, torch.zeros(2)))


@pytest.mark.parametrize("sampler", ["uniform", "uniform_scaled"])
def test_alignment_of_fedavg_is_one(tmp_path, sampler):
    lines = aligned(tmp_path / "run", "strategy=dense", "server_optimizer=plain", UNEVEN, f"clients.sampler={sampler}")
    assert [line["alignment"] for line in lines] == pytest.approx([1, 1], abs=1e-12)


def test_alignment_grows_with_the_keep_ratio_and_changes_nothing(tmp_path):
    few, many = (aligned(tmp_path / str(ratio), f"keep_ratio={ratio}", LONG_STEPS) for ratio in (0.2, 1.0))
    plain = read(run(tiny(tmp_path / "plain", "keep_ratio=0.2", LONG_STEPS, shared=RESNET)))
    cosines = [line.pop("alignment") for line in few]
    assert without_times(few) == without_times(plain)
    rare = aligned(tmp_path / "rare", "keep_ratio=0.2", LONG_STEPS, "evaluate_every=2")
    assert ["alignment" in line for line in rare] == [False, True]
    assert rare[1]["alignment"] == cosines[1]
    assert all(0 < few_terms < line["alignment"] < 1 for few_terms, line in zip(cosines, many, strict=True))
