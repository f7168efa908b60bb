"""Pilots of wireless sampling: what they teach, that it is learned once, and mistakes."""

import json
import os
import signal

import numpy as np
import pytest

from sharding import UserError
from sharding.client_sampling import estimate_beta_over_alpha
from tests.train.runs import cut_off, read, without_times
from train.callbacks.stopping import DivergedError
from train.config.schema import load_config
from train.experiment.assembly import assemble
from train.experiment.evaluation import evaluate
from train.run import run
from train.utils.signals import Stopped, StopRequest
from train.variants.pilots import DISTRIBUTIONS, PILOTS, Pilot, RunPilots, calibrate, run_pilot

WIRELESS = [
    *(
        "model={name: mlp, hidden: [16, 16]}",
        "strategy=dense",
        "rounds=12",
        "local.epochs=1",
        "local.batch_size=64",
        "local.optimizer={lr: 0.2, momentum: 0}",
    ),
    *("clients={count: 10, per_round: 3, sampler: wireless}", "data.partition=power_law", "network.bandwidth=1"),
    *("clients.pilot_losses=[2.2, 2.0]", "evaluate_every=4"),
]


def configured(output, *overrides):
    return load_config("configs/quickstart.yaml", [*WIRELESS, "engine=sequential", f"output={output}", *overrides])


def test_pilots_estimate_the_largest_norms_and_the_ratio_of_eq_35(tmp_path, monkeypatch):
    experiment, ran = assemble(configured(tmp_path)), []

    def recorded(experiment, distribution, kind, number, request):
        result = run_pilot(experiment, distribution, kind, number, request)
        ran.append((kind, number, distribution, result))
        return result

    monkeypatch.setattr("train.variants.pilots.run_pilot", recorded)
    before = {name: value.clone() for name, value in experiment.model.state_dict().items()}
    calibration = calibrate(experiment, StopRequest())
    assert all(bool((value == before[name]).all()) for name, value in experiment.model.state_dict().items())
    sizes = experiment.sampler.population.num_samples
    distributions = dict(zip(DISTRIBUTIONS, (np.full(10, 0.1), sizes / sizes.sum()), strict=True))
    assert [(kind, number) for kind, number, *_ in ran] == [(kind, k) for kind in DISTRIBUTIONS for k in range(PILOTS)]
    for kind, _, distribution, _ in ran:
        np.testing.assert_array_equal(distribution, distributions[kind])
    pilots = {kind: [result for of, *_, result in ran if of == kind] for kind in DISTRIBUTIONS}
    for kind, runs in pilots.items():
        longest = max(len(losses) for _, losses in runs)
        curve = np.mean([np.pad(losses, (0, longest - len(losses)), "edge") for _, losses in runs], axis=0)
        below = [np.flatnonzero(curve <= level) for level in (2.2, 2.0)]
        assert calibration.rounds[kind] == [int(reaching[0]) + 1 if reaching.size else None for reaching in below]
    assert calibration.rounds["uniform"][0]
    norms = np.nanmean([pilot.largest for pilot, _ in pilots["uniform"]], axis=0)
    np.testing.assert_allclose(calibration.gradient_norms, np.where(np.isnan(norms), np.nanmean(norms), norms))
    reached = [(u, w) for u, w in zip(*calibration.rounds.values(), strict=True) if u and w]
    expected, _ = estimate_beta_over_alpha(distributions["weighted"], norms, *zip(*reached, strict=True), 3)
    assert calibration.beta_over_alpha == expected


def test_pilot_keeps_the_largest_norm():
    experiment = assemble(load_config("configs/quickstart.yaml", ["model={name: mlp, hidden: [16, 16]}"]))
    pilot = Pilot(np.full(20, 0.05), 0, 5, experiment.sampler.population)
    for t, norm in enumerate((1.0, 5.0, 2.0, float("nan"))):
        pilot.select(t, pilot.invite(t), {3: norm})
    assert pilot.largest[3] == 5.0
    assert np.isnan(np.delete(pilot.largest, 3)).all()


def test_pilots_of_two_seeds_with_one_data_seed_are_the_same(tmp_path):
    runs = []
    for seed in (0, 1):
        overrides = ["strategy=unbiased", "keep_ratio=0.5", "init=as_built", "rounds=1", "data_seed=0", f"seed={seed}"]
        experiment = assemble(configured(tmp_path, *overrides))
        runs.append(run_pilot(experiment, np.full(10, 0.1), "uniform", 0, StopRequest()))
    (first, losses), (second, same) = runs
    assert losses == same
    np.testing.assert_array_equal(first.largest, second.largest)


def test_resumed_run_reuses_the_estimates_of_its_pilots(tmp_path, monkeypatch):
    few = ["rounds=4", "checkpoint_every=2"]
    whole = run(configured(tmp_path / "whole", *few))

    cut_off(configured(tmp_path / "cut", *few), after=2)
    taught = (tmp_path / "cut" / "pilots.json").read_text()
    assert taught == (whole / "pilots.json").read_text()
    monkeypatch.setattr("train.variants.pilots.calibrate", lambda *given: pytest.fail("they were run already"))
    run(configured(tmp_path / "cut", *few), resume=True)
    assert without_times(read(tmp_path / "cut")) == without_times(read(whole))


def test_interrupted_pilots_end_with_their_round_and_start_again(tmp_path, monkeypatch):
    whole, config = run(configured(tmp_path / "whole", "rounds=2")), configured(tmp_path / "run", "rounds=2")
    measured = []

    def interrupted(*given):
        measured.append(given)
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given)

    with monkeypatch.context() as patch:
        patch.setattr("train.variants.pilots.evaluate", interrupted)
        with pytest.raises(Stopped):
            run(config)
    assert len(measured) == 1
    assert not config.directory.exists()
    assert without_times(read(run(config, resume=True))) == without_times(read(whole))


def test_run_on_a_residual_counts_the_first_contact_of_its_rounds_and_not_of_its_pilots(tmp_path):
    options = ["rounds=2", "strategy=top_n", "residual=int4", "clients.sampler=statistical", "checkpoint_every=1"]
    whole = read(run(configured(tmp_path / "whole", *options)))
    assert len(whole[0]["new_clients"]) == whole[0]["num_clients"]
    cut_off(config := configured(tmp_path / "cut", *options), after=0)
    assert without_times(read(run(config, resume=True))) == without_times(whole)


SAMPLERS_TO_CALIBRATE = {
    "Eq. 38": ["clients.sampler.beta_over_alpha=0"],
    "statistical": ["clients.sampler=statistical"],
}


@pytest.mark.parametrize("scheme", SAMPLERS_TO_CALIBRATE)
def test_pilot_estimates_serve_other_samplers_and_seeds(tmp_path, monkeypatch, scheme):
    calibration = {"beta_over_alpha": 3.0, "gradient_norms": [*map(float, range(1, 11))], "rounds": {}, "estimates": []}
    (tmp_path / "pilots.json").write_text(json.dumps(calibration))
    monkeypatch.setattr("train.variants.pilots.calibrate", lambda *given: pytest.fail("they were run already"))
    config = configured(tmp_path, *SAMPLERS_TO_CALIBRATE[scheme], "seed=3", "data_seed=0", "rounds=2")
    experiment = assemble(config)
    RunPilots(StopRequest()).before_training(experiment)
    drawn = [experiment.sampler.invite(t) for t in range(2)]
    population = experiment.sampler.population
    a = population.num_samples * np.arange(1.0, 11.0)
    q = a / np.sqrt(population.profiles.costs(3)) if scheme == "Eq. 38" else a
    np.testing.assert_allclose(experiment.sampler.probabilities(), q / q.sum())
    run(config, resume=True)
    assert [line["num_clients"] for line in read(tmp_path)] == [len(cohort) for cohort in drawn]


def test_runs_with_the_same_world_seed_differ_only_in_draws_and_batches(tmp_path):
    mixed = "keep_ratio={0.2: 0.5, 0.4: 0.5}"
    one, other, third = (
        assemble(configured(tmp_path, f"seed={seed}", f"data_seed={world}", mixed))
        for seed, world in ((1, 5), (2, 5), (5, "null"))
    )
    for another in (other, third):
        assert another.clients.keep_ratios == one.clients.keep_ratios
        assert bool((another.clients.data.all().inputs == one.clients.data.all().inputs).all())
        assert (another.sampler.population.profiles.compute == one.sampler.population.profiles.compute).all()
        state = another.model.state_dict()
        assert all(bool((value == state[name]).all()) for name, value in one.model.state_dict().items())
    assert [one.sampler.invite(t) for t in range(9)] != [other.sampler.invite(t) for t in range(9)]
    assert one.job.seed != other.job.seed
    distribution = np.full(10, 0.1)
    curves = [run_pilot(each, distribution, "uniform", 0, StopRequest())[1] for each in (one, other)]
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "cannot read"),
        (
            '{"beta_over_alpha": 1.0, "gradient_norms": [1.0, 2.0], "rounds": {}, "estimates": []}',
            "of 2 clients, not 10",
        ),
    ],
)
def test_invalid_pilots_file_raises_with_its_path(tmp_path, content, told):
    path = tmp_path / "pilots.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"{told}.*delete it"):
        RunPilots(StopRequest()).before_training(assemble(configured(tmp_path)))


def test_pilots_that_diverge_raise_and_leave_no_folder(tmp_path):
    config = configured(tmp_path / "run", "local.optimizer.lr=1e30")
    with pytest.raises(DivergedError, match=r"pilot 1 of 3 with uniform draws: the training diverged, so lower"):
        run(config)
    assert not config.directory.exists()
