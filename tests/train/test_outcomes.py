"""Trainings that go wrong end in a line that says so, and leave nothing in the way of the next one."""

import pytest
import torch

from tests.train.runs import tiny
from train.assembly import assemble
from train.callbacks.stopping import DivergedError
from train.engines.local import evaluate
from train.run import run

PILOTS = [
    *("strategy=dense", "clients.sampler=wireless", "network.bandwidth=1", "clients.beta_over_alpha=pilots"),
    *("clients.pilot_losses=[2.2]", "local.lr=1e30"),
]


def test_pilots_that_diverge_say_so_and_leave_no_folder(tmp_path):
    config = tiny(tmp_path / "run", *PILOTS)
    with pytest.raises(DivergedError, match=r"pilot 1 of 3 with uniform draws: lower local\.lr"):
        run(config)
    assert not config.directory.exists()


def test_an_evaluation_that_is_not_finite_is_reported(tmp_path, caplog):
    experiment = assemble(tiny(tmp_path / "run"))
    with torch.no_grad():
        next(experiment.model.parameters()).fill_(torch.nan)
    evaluate(experiment.model, experiment.dataset, experiment.dataset.test)
    assert "loss on digits is nan" in caplog.text
