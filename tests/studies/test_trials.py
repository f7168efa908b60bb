"""Trials: each change is exactly what it says, on a tiny model, and moves the bytes that its arm claims."""

import json
import math

import pandas as pd
import pytest
import torch

from sharding import Update
from studies import __main__ as command
from studies import changes, trials
from studies.curves import by_scheme
from studies.runner import CONFIGS
from train.config.schema import load_config
from train.data import empty_dataset
from train.experiment.assembly import assemble, make_model, make_planner
from train.rounds import run_rounds

TINY = [
    *("recipe=tuned", "keep_ratio=0.3", "rounds=2", "evaluate_every=1", "engine=sequential", "local.steps=2"),
    *("model.width=8", "model.groups=4", "model.blocks=[1, 1]", "clients.count=6", "clients.per_round=2"),
]
LAYER = "stages.1.0.conv2"


def tiny(*words):
    return load_config(CONFIGS / "quickstart.yaml", [*TINY, *words])


def started(change, *words):
    experiment = assemble(tiny(*words))
    measures = change(experiment)
    experiment.start()
    return experiment, measures


def weights(model, names):
    return {name: model.get_submodule(name).weight.detach().flatten(1).double() for name in names}


def test_server_at_rank_n_is_the_truncated_svd_of_the_plain_step():
    far = ("rounds=1", "local.steps=10", "local.optimizer.lr=0.1")  # beyond rank n is what is of second order
    plain, _ = started(changes.unchanged, *far)
    ours, measures = started(trials.server_at_rank_n, *far)
    for experiment in (plain, ours):
        run_rounds(experiment)
    ranks = trials.terms_of(ours)
    assert ranks[LAYER] == math.ceil(0.3 * 16)
    expected, found = (weights(experiment.model, ranks) for experiment in (plain, ours))
    beyond = total = 0.0
    for name, n in ranks.items():
        left, magnitudes, right = torch.linalg.svd(expected[name], full_matrices=False)
        truncated = left[:, :n] @ magnitudes[:n].diag() @ right[:n]
        torch.testing.assert_close(found[name], truncated, rtol=1e-5, atol=1e-6)
        assert torch.linalg.matrix_rank(found[name], rtol=1e-5) == n
        beyond, total = beyond + magnitudes[n:].square().sum(), total + magnitudes.square().sum()
    assert measures["beyond_n"]() == pytest.approx(float(beyond / total))
    assert beyond > 1e-6
    assert torch.equal(plain.model.fc.weight, ours.model.fc.weight)


def test_measures_of_the_base_leave_the_run_as_it_is():
    plain, _ = started(changes.unchanged)
    ours, measures = started(trials.ranks_measured)
    for experiment in (plain, ours):
        run_rounds(experiment)
    assert 0 < measures["beyond_n"]() < 0.5
    assert 0 <= measures["cut_accuracy"]() <= 1
    for name, value in plain.server.state_dict().items():
        assert torch.equal(value, ours.server.state_dict()[name]), name
    assert all(map(torch.equal, plain.model.parameters(), ours.model.parameters()))


@pytest.mark.parametrize(("t", "sent", "kept"), [(0, "v", "u"), (1, "u", "v")])
def test_one_factor_of_a_round_moves_and_is_sent(t, sent, kept):
    experiment, _ = started(trials.one_factor)
    plan = experiment.plan([0, 1], t)
    for (client, shard), (_, reply) in zip(plan.shards(), experiment.engine.train(plan, t, 0.1), strict=True):
        whole = Update(**vars(reply.update))
        for name, terms in reply.update.terms.items():
            assert torch.equal(getattr(terms, kept), getattr(shard.terms[name], kept)), client
            assert not torch.equal(getattr(terms, sent), getattr(shard.terms[name], sent))
        numbers = sum(getattr(terms, kept).nbytes for terms in whole.terms.values())
        assert reply.update.nbytes == pytest.approx(whole.nbytes - numbers, abs=8 * len(whole.terms))
        assert reply.update.to("cpu").nbytes == reply.update.nbytes


def test_one_factor_is_trained_and_averaged_in_a_run():
    experiment, _ = started(trials.one_factor)
    before = weights(experiment.model, [LAYER])[LAYER]
    metrics = run_rounds(experiment)
    assert metrics.num_aggregated == 2
    assert not torch.equal(before, weights(experiment.model, [LAYER])[LAYER])


def nbytes_of(experiment):
    """Return the bytes of a shard with the planner's own numbers of terms."""
    return experiment.plan([0], 0).shard(0).nbytes


def arm(name):
    trial = trials.EXPERIMENTS["trials"].arms[name]
    overrides = [*trials.EXPERIMENTS["trials"].overrides, *trial.overrides, "data=digits"]
    return trial, load_config(CONFIGS / "beyond.yaml", overrides)


@pytest.mark.parametrize("name", ["narrow", "one factor", "stage 1 whole", "stages 1 and 2 whole"])
def test_arm_of_the_trials_moves_the_bytes_of_the_shards(name):
    (trial, config), (_, of_shards) = arm(name), arm("r = 0.2")
    base = make_planner(of_shards).nbytes(make_model(of_shards, empty_dataset("cifar10")), 0.2)
    experiment = assemble(config)
    trial.change(experiment)
    down = up = nbytes_of(experiment)
    if trial.change is trials.one_factor:
        shard = experiment.plan([0], 0).shard(0)
        update = vars(shard.returned(shard.trained()))
        up = (trials.OnlyU(**update).nbytes + trials.OnlyV(**update).nbytes) / 2
        assert up == pytest.approx(down / 2, rel=0.05)
    assert config.rounds * (down + up) == pytest.approx(of_shards.rounds * 2 * base, rel=0.01)


def test_arms_with_more_epochs_differ_in_these_and_in_their_rate_alone():
    for name, trial in trials.EXPERIMENTS["trials"].arms.items():
        if not name.endswith("epochs"):
            continue
        (_, config), (_, base) = arm(name), arm(trial.base)
        number, lrs = config.local.epochs, [each.local.optimizer.value("lr") for each in (config, base)]
        assert config.model_copy(update={"local": base.local}) == base
        assert lrs[0] == pytest.approx(lrs[1] / number**0.5, rel=1e-3)
        assert f"{number} epochs" in name


def test_early_stages_are_whole_and_the_last_stage_pays():
    trial, config = arm("stages 1 and 2 whole")
    experiment = assemble(config)
    before = trials.terms_of(experiment)
    trial.change(experiment)
    shard = experiment.plan([0], 0).shard(0)
    terms = {name: part.indices.numel() for name, part in shard.terms.items()}
    assert {name for name in before if name not in terms} == {n for n in before if n[:8] in ("stages.0", "stages.1")}
    assert all(name.startswith("stages.3") == (n < before[name]) for name, n in terms.items())
    for name, n in terms.items():
        assert torch.linalg.matrix_rank(weights(experiment.model, [name])[name], rtol=1e-5) == n


def test_ranks_from_spectra_are_those_of_the_change_for_the_parameters_of_a_shard(tmp_path):
    pilot = changes.run_all(
        changes.unchanged, {"pilot": tiny("strategy=dense", f"output={tmp_path / 'dense_pilot-0'}", "seed=0")}
    )
    assert pilot.last_accuracy.notna().all()
    experiment = assemble(tiny(f"output={tmp_path / 'ranks-0'}"))
    base, uniform = nbytes_of(experiment), trials.terms_of(experiment)
    trials.ranks_from_spectra(experiment)
    shard = experiment.plan([0], 0).shard(0)
    ranks = {name: part.indices.numel() for name, part in shard.terms.items()}
    assert ranks != uniform
    assert 0.9 * base < shard.nbytes <= 1.02 * base
    experiment.start()
    assert run_rounds(experiment).num_aggregated == 2
    with pytest.raises(trials.UserError, match="run the arm 'dense pilot'"):
        trials.ranks_from_spectra(assemble(tiny(f"output={tmp_path / 'ranks-1'}", "seed=1")))


def test_average_of_the_last_half_is_the_mean_of_its_models():
    experiment, _ = started(trials.average_of_last_half, "rounds=5", "local.schedule=constant")
    models = []

    class Keep(changes.Callback):
        def after_round(self, metrics, plan):
            models.append({name: part.detach().clone() for name, part in experiment.model.named_parameters()})
            if len(models) == 2:
                assert all(torch.equal(part, models[1][name]) for name, part in experiment.result.named_parameters()), (
                    "the last model"
                )

    run_rounds(experiment, callbacks=[Keep()])
    for name, part in experiment.result.named_parameters():
        expected = sum(model[name] for model in models[2:]) / 3
        torch.testing.assert_close(part.detach(), expected, rtol=1e-5, atol=1e-7)


def test_changed_run_resumes_with_the_same_curve_and_measures(tmp_path):
    words = ["rounds=4", "checkpoint_every=1"]
    whole = changes.run_all(trials.average_of_last_half, {"run": tiny(*words, f"output={tmp_path / 'whole'}")})
    cut = tiny(*words, f"output={tmp_path / 'cut'}")

    class Stop(changes.Callback):
        def after_round(self, metrics, plan):
            if metrics.round == 2:
                raise KeyboardInterrupt

    measured = changes.Measured(cut, trials.average_of_last_half)
    with pytest.raises(KeyboardInterrupt):
        changes.run(cut, [measured, Stop()], build=measured.build)
    resumed = changes.run_all(trials.average_of_last_half, {"run": cut})
    columns = ["rounds", "test_accuracy", "test_loss", "last_accuracy"]
    pd.testing.assert_frame_equal(whole[columns], resumed[columns])
    again = changes.run_all(trials.average_of_last_half, {"run": cut})
    pd.testing.assert_frame_equal(again, resumed)


def test_trials_run_once_and_their_table_has_the_gains(tmp_path, capsys):
    words = [
        "trials",
        "data=digits",
        *TINY[1:],
        "--into",
        str(tmp_path),
        "--seeds",
        "1000",
        "--only",
        "r = 0.2",
        "rank n",
    ]
    assert command.main(words) == 0
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.startswith(("| r = 0.2", "| rank n"))]) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("m*.jsonl")}
    assert command.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("m*.jsonl")} == before
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text
    line = json.loads((tmp_path / "runs" / "rank_n-1000" / "measures.jsonl").read_text().splitlines()[-1])
    assert line.keys() == {"rounds", "last_accuracy", "beyond_n", "cut_accuracy"}
    assert command.main(["trials", "--into", str(tmp_path), "--only", "rank m"]) == 2


@pytest.mark.parametrize(
    ("ends", "word"),
    [([0.53, 0.52], "yes"), ([0.53, 0.509], "no"), ([0.53], "–"), ([0.509], "no")],
)
def test_change_is_kept_if_it_gains_a_point_on_both_seeds(curves_of, ends, word):
    def course(accuracy):
        return [{"rounds": 1, "bytes_up": 1, "bytes_down": 1, "test_accuracy": accuracy, "last_accuracy": 0.4}]

    runs = {"r = 0.2-1000": course(0.5), "r = 0.2-1001": course(0.5)}
    runs |= {f"rank n-{1000 + index}": course(end) for index, end in enumerate(ends)}
    table = trials.table(trials.EXPERIMENTS["trials"], by_scheme(curves_of(runs, trials.COLUMNS)))
    assert table["more than a point"].tolist() == ["–", word]
    assert table["minus base, by seed"].tolist() == ["–", ", ".join(f"{100 * (end - 0.5):+.1f}" for end in ends)]


def test_long_run_has_both_ends_and_a_narrow_network_of_its_bytes():
    study, nbytes = trials.EXPERIMENTS["long_run"], {}
    for name, trial in study.arms.items():
        config = load_config(CONFIGS / "beyond.yaml", [*study.overrides, *trial.overrides])
        assert (config.evaluate_every, config.result) == (20, "average")
        assert config.local.schedule.name == ("constant" if name == "constant, last half" else "cosine")
        assert (config.strategy, config.rounds) == (("dense", 876) if name == "narrow" else ("top_n", 1000))
        nbytes[name] = config.rounds * make_planner(config).nbytes(make_model(config, empty_dataset("cifar10")), 0.1)
    assert nbytes["narrow"] == pytest.approx(nbytes["cosine"], rel=1e-3)
