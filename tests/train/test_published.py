"""The published experiments, cut down to two rounds on a few drawn samples: every model learns, at its full size."""

from dataclasses import replace

import pytest

from tests.train.runs import read
from train.config.schema import load_config
from train.data import Split, load_dataset
from train.experiment import assembly
from train.run import run

FEW = ["clients.count=4", "clients.per_round=2", "data.partition=iid"]
CUT = {
    "cifar10_resnet18": [*FEW, "local.epochs=4", "local.optimizer.lr=0.02"],
    "cifar100_cct": [*FEW, "local.epochs=4"],
    "shakespeare_gpt": [*FEW, "local.epochs=4", "local.optimizer.lr=0.02"],
}


def load_few(name, **options):
    dataset = load_dataset(name, **options)
    train, test = (
        Split(split.inputs[:count], split.targets[:count]) for split, count in ((dataset.train, 64), (dataset.test, 16))
    )
    return replace(dataset, train=train, test=test)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_published_experiment_of_two_rounds_lowers_the_loss(name, tmp_path, monkeypatch, drawn_data):
    monkeypatch.setattr(assembly, "load_dataset", load_few)
    fixed = [f"data.root={drawn_data}", "rounds=2", "local.batch_size=8", "keep_ratio=0.2", f"output={tmp_path}"]
    first, second = read(run(load_config(f"configs/{name}.yaml", [*fixed, *CUT[name]])))
    assert second["train_loss"] < 0.95 * first["train_loss"]
    assert first["num_failed"] == second["num_failed"] == 0
