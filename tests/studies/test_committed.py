"""The committed tables of the studies are what their committed curves make, with nothing trained."""

import shutil
from pathlib import Path

import pytest

from studies import __main__ as command
from studies.curves import read_curves, write_curves

RESULTS = Path(__file__).parents[2] / "results"
NOT_RUN = {
    "wireless_synthetic",  # its records are of another simulator: results/wireless
}
PARTLY_RUN = (
    "beyond",
    "beyond_shakespeare",
    "capacity",
    "central",
    "finetune",
    "finetune_vision",
    "full_rank_images",
    "full_rank_texts",
    "published_network",
    "trials",
    "uneven",
)


def test_every_study_has_committed_curves():
    assert {name for name in command.STUDIES if not (RESULTS / name / "summary.md").exists()} == NOT_RUN


@pytest.mark.parametrize("name", sorted(command.STUDIES.keys() - NOT_RUN))
def test_committed_table_equals_that_of_the_committed_curves(name, tmp_path, monkeypatch):
    committed, into = RESULTS / name, tmp_path / name
    shutil.copytree(committed, into, ignore=shutil.ignore_patterns("runs", "*.png", "summary.md"))
    monkeypatch.setattr("train.cli.progress.sweep", lambda *_, **__: pytest.fail("it trains"))
    assert command.main([name, "--into", str(into), *(["--only"] if name in PARTLY_RUN else [])]) == 0
    for path in [into / "summary.md", *into.rglob("*.csv")]:
        assert path.read_text("utf-8") == (committed / path.relative_to(into)).read_text("utf-8"), path.name


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*curves.csv")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_write_curves_of_read_curves_has_the_same_bytes(path, tmp_path):
    write_curves(tmp_path / "curves.csv", read_curves(path))
    assert (tmp_path / "curves.csv").read_bytes() == path.read_bytes()
