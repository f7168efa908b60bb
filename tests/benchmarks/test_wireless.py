"""The wireless study: its world, its round written out by hand, and the whole of it in a few rounds."""

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sharding import round_time
from sharding.rng import generator

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import synthetic
import wireless
import wireless_tables
from arrivals import EQ8, SCALED
from synthetic import Samples


@pytest.fixture(scope="module")
def world():
    return synthetic.make_world(0)


def splits(world):
    return ("train", world.train), ("test", world.test)


def test_the_world_is_the_published_one(world):
    total = world.sizes.sum() + len(world.test.targets)
    assert total == 20_509
    assert world.sizes.sum() / total == pytest.approx(0.9, abs=0.005)
    assert 100 * (world.shares**2).sum() == pytest.approx(6.05, abs=0.1)
    assert 20_000 < synthetic.make_world(0, "lognormal").sizes.sum() / 0.9 < 21_200


@pytest.mark.parametrize("scheme", [EQ8, SCALED])
def test_a_round_is_that_of_the_paper_written_out(world, scheme):
    q = np.full(100, 0.01) if scheme == EQ8 else None
    precise = replace(world, **{name: Samples(its.inputs.double(), its.targets) for name, its in splits(world)})
    run = synthetic.Run(precise, scheme, 3, 40, q, torch.zeros(61, 10, dtype=torch.float64))
    synthetic.train_all([run], -1.0, 1)
    clients, counts = synthetic.Run(world, scheme, 3, 40, q).draw(0)
    assert (counts.max() > 1) == (q is not None)
    model = torch.zeros(61, 10, dtype=torch.float64)
    for client, count in zip(clients.tolist(), counts.tolist(), strict=True):
        rows, lr = world.rows(client), 0.1 if q is not None else 0.1 * 100 * world.shares[client]
        own = torch.zeros(61, 10, dtype=torch.float64, requires_grad=True)
        for batch in generator(0, "batches", 3, 0, client).integers(rows.start, rows.stop, (50, 24)):
            loss = F.cross_entropy(world.train.inputs[batch].double() @ own, world.train.targets[batch])
            (gradient,) = torch.autograd.grad(loss, own)
            own = (own - lr * gradient).detach().requires_grad_()
        weight = count / 40 * (world.shares[client] / 0.01 if q is not None else 1.0)
        model += weight * own.detach()
    torch.testing.assert_close(run.model, model, rtol=1e-9, atol=1e-9)
    each = np.repeat(clients, counts)
    assert run.seconds == [round_time(world.compute[each], world.communicate[each], 1.0)]


def test_the_study_in_a_few_rounds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/wireless.py", str(tmp_path), "--quick"])
    wireless.main()
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "nan" not in text.lower()
    assert text.count("| proposed |") == 3
    assert text.count("| weighted |") == 3
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    setting = wireless.Setting.quick()
    assert len(rows) == setting.runs * (len(wireless.SCHEMES) + len(wireless.BETAS) + 2 * len(wireless.PUBLISHED_SWEEP))
    assert len({(row["part"], row["scheme"], row["K"], row["seed"]) for row in rows}) == len(rows)
    monkeypatch.setattr(wireless, "train", lambda *_: pytest.fail("it trains"))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.[cjm]*")}
    wireless.main()
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.[cjm]*")}
    assert wireless.Records.read(tmp_path, wireless.Setting()) is None, "another setting is run"


def test_records_tell_what_their_runs_told(tmp_path, world):
    setting = replace(wireless.Setting.quick(), target=2.2, sweep_target=2.25)
    runs = synthetic.train_all([synthetic.Run(world, "weighted", seed, 10, world.shares) for seed in (0, 1)], 2.2, 3)
    lesson = wireless.Lesson(2.5, [1.0, 2.0], {"uniform": [3, None], "weighted": [2, 5]}, [2.5, None])
    kept = wireless.arrivals_of("main", runs, setting)
    endings = wireless.endings_of(runs[:1], 2.2)
    worlds = {"zipf": endings, "lognormal": []}
    wireless.Records(setting, 12.0, [lesson], kept, worlds, wireless.bands_of({"weighted": runs})).write(tmp_path)
    found = wireless.Records.read(tmp_path, setting)
    assert found.lessons == [lesson]
    for run, its in zip(runs, found.of("main", "weighted", 10), strict=True):
        assert (its.seed, its.done) == (run.seed, len(run.losses))
        for loss in (2.2, 2.25):
            assert its.seconds_to(loss) == pytest.approx(run.seconds_to(loss), abs=0.051)
        assert its.rounds_to(2.2) == run.rounds_to(2.2)
        assert its.seconds_to(accuracy=0.3) == (None if (at := run.seconds_to(accuracy=0.3)) is None else round(at, 1))
    assert found.worlds["zipf"][0].seconds == pytest.approx(endings[0].seconds, abs=0.051)
    assert found.bands[0].middle == pytest.approx(np.median([run.losses[0] for run in runs]), rel=0.2)


def test_what_has_been_run_is_not_run_again(tmp_path, world, capsys):
    def play(times, setting):
        def work(seed):
            trained.append(seed)
            return [synthetic.Run(world, "weighted", seed, 10, None)]

        trained = []
        for _ in range(times):
            runs, spent = wireless.side_by_side("seeds", work, [3, 4], setting, tmp_path, jobs=1)
            assert spent > 0
            assert [run.seed for (run,) in runs] == [3, 4]
        return trained

    assert play(2, wireless.Setting()) == [3, 4]
    assert play(1, wireless.Setting()) == []
    assert play(1, wireless.Setting.quick()) == [3, 4]


def test_the_world_is_the_one_of_the_nearest_pilots():
    def lesson(uniform, weighted):
        return wireless.Lesson(1.0, [], {"uniform": uniform, "weighted": weighted}, [])

    published = [list(wireless_tables.PUBLISHED_ROUNDS[name]) for name in ("uniform", "weighted")]
    assert wireless_tables.distance(lesson(*published)) == 0
    assert wireless_tables.distance(lesson(published[0], [2 * r for r in published[1]])) == pytest.approx(np.log(2) / 2)
    assert wireless_tables.distance(lesson([r / 2 for r in published[0]], published[1])) == pytest.approx(np.log(2) / 2)
    assert wireless_tables.distance(lesson(published[0], [*published[1][:-1], None])) == np.inf


def test_another_beta_gives_other_draws(world):
    lesson = wireless.Lesson(50.0, list(np.linspace(1, 2, len(world.shares))), {}, [])
    own = wireless.law_of("proposed", world, lesson, wireless.K)
    (run,) = wireless.with_other_beta(world, lesson, 50.0, [7])
    np.testing.assert_array_equal(run.q, own)
    (other,) = wireless.with_other_beta(world, lesson, 20.0, [7])
    assert np.abs(other.q - own).max() > 1e-3
    assert (run.scheme, other.scheme, other.seed) == ("proposed, β/α = 50", "proposed, β/α = 20", 7)
