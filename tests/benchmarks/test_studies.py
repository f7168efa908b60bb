"""The studies of client sampling run end to end, at a size that shows nothing but that."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "wireless_mnist": ["clients.count=20", "evaluate_every=1"],
}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name):
        module = importlib.import_module(name)
        for constant, value in {"SEEDS": (0, 1), "TARGET": 0.05}.items():
            if hasattr(module, constant):
                monkeypatch.setattr(module, constant, value)
        return module

    return load


@pytest.mark.parametrize("name", SMALL)
def test_a_study_writes_its_table_curves_and_figure(study, tmp_path, name):
    study(name).main(tmp_path, ["rounds=2", "data.name=digits", "device=cpu", *SMALL[name]])
    table = (tmp_path / "summary.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) >= 5
    assert {row.count("|") for row in rows} == {rows[0].count("|")}
    assert f"Made by `python benchmarks/{name}.py results/" in table
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert len((tmp_path / "curves.csv").read_text().splitlines()) > len(rows)
