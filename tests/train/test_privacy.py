"""Runs with differential privacy: every engine, resumed runs, the budget, and what a run tells and keeps to itself."""

import shutil
import stat
import sys

import pytest
import torch

from sharding import UserError
from sharding.rounds.privacy.accountant import epsilon
from tests.train.runs import QUICKSTART, assert_same, cut_off, read, tiny
from train.callbacks import Callback
from train.cli.commands import main
from train.cli.progress import RunProgress
from train.config.naming import with_directory
from train.experiment.assembly import assemble
from train.experiment.budget import spent_epsilon
from train.run import run
from train.rundir.file_names import CHECKPOINT_FILE, CONFIG_FILE, SECRET_FILE

NOISE = "privacy={clipping_norm: 0.5, noise_multiplier: 1.0, delta: 1e-4}"
KNOWN = "privacy={clipping_norm: 0.5, noise_multiplier: 1.0, delta: 1e-4, secret_seed: 5}"
POISSON = ["clients.sampler=poisson", "checkpoint_every=1"]


class Sent(Callback):
    """Keeps what the clients of each round are sent whole, and the model after the round before."""

    def __init__(self):
        self.sent, self.models = [], []

    def before_training(self, experiment):
        self.experiment = experiment

    def after_round(self, metrics, plan):
        self.sent.append({name: part.clone() for name, part in plan.whole.items()})
        self.models.append({name: part.clone() for name, part in self.experiment.model.state_dict().items()})


@pytest.mark.parametrize("engine", ["lanes", pytest.param("processes", marks=pytest.mark.slow)])
def test_in_every_engine_clients_are_sent_the_noisy_model_of_the_round_before(tmp_path, engine):
    seen = Sent()
    run(tiny(tmp_path / "here", *POISSON, KNOWN, f"engine={engine}"), [seen])
    assert seen.sent[1]
    assert all(torch.equal(part, seen.models[0][name]) for name, part in seen.sent[1].items())
    assert_same(tmp_path / "here", run(tiny(tmp_path / "sequential", *POISSON, KNOWN)))
    quiet = Sent()
    run(tiny(tmp_path / "quiet", *POISSON, KNOWN, "privacy.noise_multiplier=0"), [quiet])
    assert not any(torch.equal(part, quiet.sent[1][name]) for name, part in seen.sent[1].items())


def test_resumed_run_releases_the_same_bits_and_spends_once(tmp_path):
    longer = ["rounds=3", "checkpoint_every=2", "clients.sampler=poisson", NOISE]
    config = tiny(tmp_path / "run", *longer)
    cut_off(config, after=2)  # the last round has metrics and no checkpoint: it is run again
    before = read(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run" / SECRET_FILE).stat().st_mode) == 0o600
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    (tmp_path / "again" / CHECKPOINT_FILE).unlink()  # all rounds are run again
    assert_same(run(config, resume=True), run(tiny(tmp_path / "again", *longer), resume=True))
    assert [line["epsilon"] for line in before] == [line["epsilon"] for line in read(tmp_path / "run")]
    assert [line["epsilon"] for line in before] == [spent_epsilon(config, rounds) for rounds in (1, 2, 3)]


def test_resume_without_the_secret_seed_is_refused(tmp_path):
    config = tiny(tmp_path / "run", *POISSON, NOISE)
    cut_off(config, after=0)
    (tmp_path / "run" / SECRET_FILE).unlink()
    with pytest.raises(UserError, match="cannot read the secret seed"):
        run(config, resume=True)


def test_budget_ends_a_run_before_it_would_be_exceeded(tmp_path):
    config = tiny(tmp_path / "run", *POISSON, NOISE, "rounds=9", "evaluate_every=9")
    budget = (spent_epsilon(config, 3) + spent_epsilon(config, 4)) / 2
    run(config.model_copy(update={"privacy": config.privacy.model_copy(update={"max_epsilon": budget})}))
    lines = read(tmp_path / "run")
    assert [line["epsilon"] for line in lines] == [spent_epsilon(config, rounds) for rounds in (1, 2, 3)]
    assert "another round would spend more than privacy.max_epsilon" in lines[-1]["stopped"]
    assert "test_accuracy" in lines[-1]


def test_two_runs_have_other_noise_and_clients_and_no_secret_in_their_configuration(tmp_path):
    first, second = (run(tiny(tmp_path / name, *POISSON, NOISE, "clients.per_round=20")) for name in "ab")
    secrets = [(directory / SECRET_FILE).read_text().strip() for directory in (first, second)]
    assert secrets[0] != secrets[1]
    assert [line["test_loss"] for line in read(first)] != [line["test_loss"] for line in read(second)]
    written = [path for path in first.iterdir() if path.name != SECRET_FILE]
    assert all(
        text.encode() not in path.read_bytes() for path in written for text in (secrets[0], str(int(secrets[0], 16)))
    )


def test_given_seed_is_told_and_not_in_the_name(tmp_path, caplog):
    config = tiny(tmp_path / "run", *POISSON, KNOWN)
    run(config)
    assert "whoever knows it can take the noise away" in caplog.text
    assert not (tmp_path / "run" / SECRET_FILE).exists()
    assert "secret_seed: 5" in (tmp_path / "run" / CONFIG_FILE).read_text()
    named = with_directory(config.model_copy(update={"output": None}), ["privacy.secret_seed=5", "rounds=3"])
    assert "5" not in named.directory.name
    assert "rounds=3" in named.directory.name


def test_metrics_have_no_loss_of_clients_and_progress_has_epsilon(tmp_path):
    (*_, line) = read(run(tiny(tmp_path / "run", *POISSON, NOISE)))
    assert not {"train_loss", "discrepancy", "discrepancy_client"} & line.keys()
    progress = RunProgress("run", 2)
    progress.update(line)
    assert f"ε {line['epsilon']:.3g}" in str(progress)


def test_uniform_clients_are_accounted_by_a_replaced_client(tmp_path):
    poisson, uniform = (tiny(tmp_path, NOISE, f"clients.sampler={name}") for name in ("poisson", "uniform"))
    assert assemble(poisson).server.privacy.sampling == "poisson"
    assert assemble(uniform).server.privacy.sampling == "fixed"
    assert spent_epsilon(uniform, 3) > spent_epsilon(poisson, 3)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["clients.sampler=weighted"], "clients.sampler=weighted"),
        (["clients.sampler={name: uniform, replacement: true}"], "uniform without replacement"),
        (["aggregation.norm_bound=5"], "aggregation.norm_bound"),
        (["aggregation.max_share=0.5"], "aggregation.max_share"),
        (["alignment=true"], "alignment"),
        (["evaluate_training=true"], "evaluate_training"),
        (["privacy.delta=0.05"], "1/clients.count=0.05"),
        (["privacy.max_epsilon=0.1"], "privacy.noise_multiplier"),
        (["privacy.clipping_norm=0"], "privacy.clipping_norm"),
    ],
)
def test_what_privacy_excludes_is_refused_in_one_line(capsys, overrides, named):
    assert main(["run", QUICKSTART, NOISE, *overrides]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_run_without_the_package_of_the_account_is_refused_before_its_first_round(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    epsilon.cache_clear()
    assert main(["run", QUICKSTART, NOISE, f"output={tmp_path / 'run'}"]) == 2
    assert "pip install dp-accounting" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
