"""Pilots of wireless sampling: what they teach, that it is learned once, and mistakes."""

import json

import numpy as np
import pytest

from sharding import UserError
from sharding.clients import estimate_beta_over_alpha
from train.config import load_config
from train.experiment import assemble
from train.pilots import LAWS, PILOTS, Pilot, fly, learn
from train.run import run

WIRELESS = [
    *("model={name: mlp, hidden: [16, 16]}", "strategy=dense", "rounds=12", "local.epochs=1", "local.momentum=0"),
    *("clients={count: 10, per_round: 3, sampler: wireless}", "data.partition=power_law", "network.bandwidth=1"),
    *("clients.beta_over_alpha=pilots", "clients.pilot_losses=[2.2, 2.0]", "evaluate_every=4"),
]


def configured(output, *overrides):
    return load_config("configs/quickstart.yaml", [*WIRELESS, f"output={output}", *overrides])


def ignore(metrics):
    pass


def test_pilots_teach_the_largest_norms_and_the_ratio_of_eq_35(tmp_path):
    experiment = assemble(configured(tmp_path))
    before = {name: value.clone() for name, value in experiment.model.state_dict().items()}
    lesson = learn(experiment)
    assert all(bool((value == before[name]).all()) for name, value in experiment.model.state_dict().items())
    sizes = experiment.sampler.population.num_samples
    laws = dict(zip(LAWS, (np.full(10, 0.1), sizes / sizes.sum()), strict=True))
    flown = {kind: [fly(experiment, law, kind, k) for k in range(PILOTS)] for kind, law in laws.items()}
    curves = {
        kind: np.mean([losses[: min(map(len, (x for _, x in its)))] for _, losses in its], axis=0)
        for kind, its in flown.items()
    }
    for kind, curve in curves.items():
        below = [np.flatnonzero(curve <= level) for level in (2.2, 2.0)]
        assert lesson.rounds[kind] == [int(its[0]) + 1 if its.size else None for its in below]
    assert lesson.rounds["uniform"][0]
    norms = np.nanmean([pilot.largest for pilot, _ in flown["uniform"]], axis=0)
    np.testing.assert_allclose(lesson.gradient_norms, np.where(np.isnan(norms), np.nanmean(norms), norms))
    reached = [(u, w) for u, w in zip(*lesson.rounds.values(), strict=True) if u and w]
    assert lesson.beta_over_alpha == estimate_beta_over_alpha(laws["weighted"], norms, *zip(*reached, strict=True), 3)


def test_a_pilot_keeps_the_largest_norm():
    experiment = assemble(load_config("configs/quickstart.yaml", ["model={name: mlp, hidden: [16, 16]}"]))
    pilot = Pilot(np.full(20, 0.05), 0, 5, experiment.sampler.population)
    for t, norm in enumerate((1.0, 5.0, 2.0, float("nan"))):
        pilot.hear(t, pilot.invite(t), {3: norm})
    assert pilot.largest[3] == 5.0
    assert np.isnan(np.delete(pilot.largest, 3)).all()


def test_what_pilots_taught_is_kept_for_a_resumed_run(tmp_path, monkeypatch):
    whole = run(configured(tmp_path / "whole"), ignore)

    def pull_the_plug(metrics):
        if metrics["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(configured(tmp_path / "cut"), pull_the_plug)
    taught = (tmp_path / "cut" / "pilots.json").read_text()
    assert taught == (whole / "pilots.json").read_text()
    monkeypatch.setattr("train.pilots.learn", lambda experiment: pytest.fail("they were run already"))
    run(configured(tmp_path / "cut"), ignore, resume=True)
    lines = [
        [json.loads(line)["train_loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (whole, tmp_path / "cut")
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    "overrides", [["clients.pilot_losses=[]"], ["clients.beta_over_alpha=0.1"], ["clients.sampler=statistical"]]
)
def test_pilots_need_losses_and_the_wireless_sampler(tmp_path, overrides):
    with pytest.raises(UserError, match="go together; set all or none"):
        configured(tmp_path, *overrides)
