"""Runs with differential privacy: every engine, resumed runs, the budget, and what a run tells and keeps to itself."""

import shutil
import signal
import stat
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import UserError
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.privacy import accountant, average
from sharding.rounds.privacy.average import PrivateAverage
from tests.train.runs import QUICKSTART, REPOSITORY, TINY, assert_same, count_writes, cut_off, in_a_process, read, tiny
from train.callbacks import Callback, EachRound
from train.cli.commands import main
from train.cli.progress import RunProgress
from train.config.naming import with_directory
from train.data.partition import class_counts
from train.experiment.assembly import assemble
from train.experiment.budget import Account, spent_epsilon
from train.run import run
from train.rundir.file_names import (
    BEST_FILE,
    CHECKPOINT_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    MODEL_FILE,
    PREVIOUS_FILE,
    PROVENANCE_FILE,
    SECRET_CLIENTS_FILE,
    SECRET_FILE,
)
from train.utils.errors import RunError

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
    # Whatever ends the run, its ε is that of all rounds that it might have released.
    assert [line["epsilon"] for line in (*before, *read(tmp_path / "run"))] == [spent_epsilon(config, 3)] * 6
    seed, *releases = (tmp_path / "run" / SECRET_FILE).read_text().splitlines()
    assert [release.split()[0] for release in releases] == ["0", "1", "2"]
    assert (tmp_path / "again" / SECRET_FILE).read_text().splitlines() == [seed, *releases]


RELEASED = ["rounds=4", "checkpoint_every=1", "clients.sampler=poisson", "clients.per_round=8", KNOWN, "threads=1"]


def killed_and_resumed(folder, engines, moments):
    """Return the directory of a run that is killed at these moments, each time resumed on the next engine."""
    configs = [tiny(folder / "run", *RELEASED, "strategy=top_n", f"engine={engine}") for engine in engines]
    for config, moment in zip(configs, moments, strict=False):
        resume = config.directory.exists()
        killed = in_a_process(lambda at=moment, one=config, on=resume: count_writes(one, at, on))
        assert killed in (0, -signal.SIGKILL)
    return run(configs[-1], resume=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tiny(tmp_path_factory.mktemp("whole") / "run", *RELEASED, "strategy=top_n"))


@given(st.permutations(["sequential", "lanes", "processes"]), st.lists(st.integers(4, 34), min_size=2, max_size=2))
@settings(max_examples=2, deadline=None)
def test_run_killed_and_resumed_on_another_engine_releases_the_same_sums(tmp_path_factory, whole, engines, moments):
    directory = killed_and_resumed(tmp_path_factory.mktemp("killed"), engines, moments)
    assert (directory / SECRET_FILE).read_bytes() == (whole / SECRET_FILE).read_bytes()  # with the name of each release
    assert_same(directory, whole)


def round_otherwise(monkeypatch):
    """Let norms be rounded as on another processor."""
    norm_of = average.norm_of
    monkeypatch.setattr(average, "norm_of", lambda changes: norm_of(changes) * (1 + 1e-15))


def test_round_that_runs_again_with_another_result_is_one_more_release(tmp_path, caplog, monkeypatch):
    config = tiny(tmp_path / "run", "rounds=4", "checkpoint_every=2", "clients.sampler=poisson", KNOWN)
    config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"clipping_norm": 1e-3})})
    cut_off(config, after=2)
    shutil.copytree(tmp_path / "run", tmp_path / "once")
    round_otherwise(monkeypatch)
    run(config, resume=True)
    assert [line["epsilon"] for line in read(tmp_path / "run")[2:]] == [spent_epsilon(config, 5)] * 2
    assert "round 2 runs again with another result" in caplog.text
    again = [line.split()[0] for line in (tmp_path / "run" / SECRET_FILE).read_text().splitlines()[1:]]
    assert again == ["0", "1", "2", "2", "3"]
    # A file without the releases of earlier rounds, as of an earlier version, knows that there were some.
    path = tmp_path / "once" / SECRET_FILE
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    run(config.model_copy(update={"output": tmp_path / "once"}), resume=True)
    assert read(tmp_path / "once")[-1]["epsilon"] == spent_epsilon(config, 5)


def test_no_release_is_beyond_the_budget_however_often_rounds_run_again(tmp_path):
    config = tiny(tmp_path / "run", *POISSON, NOISE, "rounds=9")
    allowed = (spent_epsilon(config, 6) + spent_epsilon(config, 7)) / 2
    config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"max_epsilon": allowed})})
    kept = []
    account = Account(config, keep=kept.append)
    for round in range(4):
        account.add(round, "first")
        assert not account.ends_with(round)
    again = Account(config, kept, kept.append)  # after a kill
    again.add(2, "first")
    assert not again.ends_with(2)
    again.add(2, "second")
    assert again.epsilon == spent_epsilon(config, 6)
    assert not again.ends_with(2)
    again.add(3, "second")
    assert again.ends_with(3)
    with pytest.raises(RunError, match="resume the run where it was started"):
        Account(config, kept).add(1, "third")
    assert len(kept) == 6


BEGUN = [METRICS_FILE, CHECKPOINT_FILE, PREVIOUS_FILE, BEST_FILE, MODEL_FILE, SECRET_CLIENTS_FILE, PROVENANCE_FILE]


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """A private run that chose its seed."""
    return run(tiny(tmp_path_factory.mktemp("private") / "run", *POISSON, NOISE, "local.schedule=constant"))


@pytest.mark.parametrize("left", BEGUN)
def test_private_run_that_has_begun_never_starts_anew_by_whatever_file_says_so(tmp_path, private, left):
    config = tiny(tmp_path / "run", *POISSON, NOISE, "local.schedule=constant")
    shutil.copytree(private, config.directory)
    for name in {SECRET_FILE, *BEGUN} - {left}:
        (tmp_path / "run" / name).unlink()
    for problem in ("cannot read the secret seed", f"holds {left} but no {CONFIG_FILE}"):
        with pytest.raises(UserError, match=problem):
            run(config.model_copy(update={"rounds": 3}), resume=True)
        with pytest.raises(UserError, match="already"):
            run(config)
        (tmp_path / "run" / CONFIG_FILE).unlink(missing_ok=True)


def test_what_a_directory_shows_is_no_function_of_the_cohort(tmp_path, monkeypatch):
    """Two runs that release the same models have the same files, whoever takes part, fails, and has which data."""
    command = [str(REPOSITORY / QUICKSTART), *TINY, *POISSON, KNOWN, "strategy=collective", "output=run"]
    command += ["keep_ratio={0.2: 0.5, 0.4: 0.5}"]
    monkeypatch.setattr(PrivateAverage, "_count", lambda *update: None)  # so that the sums are the same
    shown = []
    for name, cohort, sizes in (("one", [0, 1, 2, 7], 1), ("other", [5, 7], 2)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setattr("sharding.client_sampling.PoissonSampler.invite", lambda *round, who=cohort: who)
        monkeypatch.setattr(
            "train.rundir.records.class_counts",
            lambda owned, targets, classes, times=sizes: times * class_counts(owned, targets, classes),
        )
        if name == "other":
            monkeypatch.setattr(average.PrivateAverage, "add", fail_client_7(PrivateAverage.add))
        assert main(["run", *command, "engine=sequential"]) == 0
        assert main(["report", "run"]) == 0
        files = {path.name: path.read_bytes() for path in (tmp_path / name / "run").rglob("*") if path.is_file()}
        secret = {name: files.pop(name) for name in list(files) if name.startswith("secret")}
        shown.append((files, secret))
    (one, one_secret), (other, other_secret) = shown
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert {CONFIG_FILE, METRICS_FILE, CHECKPOINT_FILE, PROVENANCE_FILE, "report.html", "summary.csv"} <= one.keys()
    assert one_secret[SECRET_CLIENTS_FILE] != other_secret[SECRET_CLIENTS_FILE]
    assert all(stat.S_IMODE((tmp_path / "one" / "run" / name).stat().st_mode) == 0o600 for name in one_secret)


SENT = [["strategy=collective"], ["strategy=top_n", "compression=int8"], ["strategy=top_n", "residual=int4"]]


@pytest.mark.parametrize("options", [*SENT, ["strategy=dense"]], ids=" ".join)
def test_expected_bytes_are_those_of_all_clients_where_all_take_part(tmp_path, options):
    everybody = ["clients.per_round=40", "keep_ratio={0.2: 0.5, 0.4: 0.5}", *POISSON, KNOWN]
    experiment = assemble(tiny(tmp_path, *everybody, *options))
    plan = experiment.plan(range(40), 0)
    updates = [shard.returned(shard.trained()) for _, shard in plan.shards()]
    down = plan.nbytes + 40 * experiment.residual_nbytes
    assert experiment.expected_bytes(0) == (down, sum(update.nbytes for update in updates))


def fail_client_7(add):
    def failing(self, client, update, weight=None):
        add(self, client, Failure(Kind.FAILED, "no battery") if client == 7 else update, weight)

    return failing


def test_failures_and_progress_of_a_private_run_are_told_to_its_owner_only(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(PrivateAverage, "add", fail_client_7(PrivateAverage.add))
    monkeypatch.setattr("sharding.client_sampling.PoissonSampler.invite", lambda *round: [7])
    shown = []
    with pytest.raises(RunError, match="in a row: the log has the reasons"):
        run(tiny(tmp_path / "run", *POISSON, NOISE), [EachRound(shown.append)])
    assert "client 7 is left out of round 0: no battery" in caplog.text
    assert not any("fail" in key or key.startswith("seconds") for line in shown for key in line)


def test_budget_ends_a_run_before_it_would_be_exceeded(tmp_path):
    config = tiny(tmp_path / "run", *POISSON, NOISE, "rounds=9", "evaluate_every=9")
    budget = (spent_epsilon(config, 3) + spent_epsilon(config, 4)) / 2
    run(config.model_copy(update={"privacy": config.privacy.model_copy(update={"max_epsilon": budget})}))
    lines = read(tmp_path / "run")
    assert [line["epsilon"] for line in lines] == [spent_epsilon(config, 3)] * 3
    assert "another round would spend more than privacy.max_epsilon" in lines[-1]["stopped"]
    assert "test_accuracy" in lines[-1]


def test_two_runs_have_other_noise_and_clients_and_no_secret_in_their_configuration(tmp_path, private):
    other = run(tiny(tmp_path, *POISSON, NOISE, "local.schedule=constant"))
    secrets = [(directory / SECRET_FILE).read_text().partition("\n")[0] for directory in (private, other)]
    assert secrets[0] != secrets[1]
    assert [line["test_loss"] for line in read(private)] != [line["test_loss"] for line in read(other)]
    written = [path.read_bytes() for path in private.iterdir() if path.name != SECRET_FILE]
    assert not any(text.encode() in file for file in written for text in (secrets[0], str(int(secrets[0], 16))))


def test_given_seed_is_told_and_not_in_the_name(tmp_path, caplog):
    config = tiny(tmp_path / "run", *POISSON, KNOWN, "rounds=1")
    run(config)
    assert "whoever knows it can take the noise away" in caplog.text
    assert "secret_seed: 5" in (tmp_path / "run" / CONFIG_FILE).read_text()
    named = with_directory(config.model_copy(update={"output": None}), ["privacy.secret_seed=5", "rounds=3"])
    assert "5" not in named.directory.name
    assert "rounds=3" in named.directory.name


def test_metrics_have_no_loss_of_clients_and_progress_has_epsilon(private):
    (*_, line) = read(private)
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
    accountant._epsilon.cache_clear()
    assert main(["run", QUICKSTART, NOISE, f"output={tmp_path / 'run'}"]) == 2
    assert "pip install dp-accounting" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
