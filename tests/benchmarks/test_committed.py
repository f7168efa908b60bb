"""The committed tables of the studies are what their committed curves make, with nothing trained."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import beyond
import cifar100_uploads
import joint_sampling
import multi_task
import shakespeare_uploads
import studies
import uneven_clients
import wireless
import wireless_mnist

RESULTS = Path(__file__).parents[2] / "results"
STUDIES = {
    "uneven_clients": lambda into: uneven_clients.main(into, [], False),
    "joint_sampling": lambda into: joint_sampling.main(into, [], False),
    "cifar100_uploads": lambda into: cifar100_uploads.main(into, [], False),
    "shakespeare_uploads": lambda into: shakespeare_uploads.main(into, [], False),
    "multi_task": lambda into: multi_task.main(into, [], False),
    "wireless": lambda into: wireless.tell(into, False, 1),
    "wireless_logistic": lambda into: wireless_mnist.main(into, 1, [], False, None, 1),
    "wireless_mnist": lambda into: wireless_mnist.main(into, 3, [], False, None, 1),
    "beyond": lambda into: beyond.main([str(into), "--only"]),
    "beyond_uneven": lambda into: beyond.main([str(into), "--on", "uneven", "--only"]),
    "beyond_shakespeare": lambda into: beyond.main([str(into), "--on", "shakespeare", "--only"]),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_table_is_made_of_committed_curves(name, tmp_path, monkeypatch):
    committed, into = RESULTS / name, tmp_path / name
    shutil.copytree(committed, into, ignore=shutil.ignore_patterns("runs", "*.png", "*.svg", "summary.md"))
    monkeypatch.setattr(studies, "compare", lambda cells, *_, **__: pytest.fail("it trains") if cells else {})
    monkeypatch.setattr(wireless, "train", lambda *_: pytest.fail("it trains"))
    STUDIES[name](into)
    for path in [into / "summary.md", *into.rglob("*.csv")]:
        assert path.read_text("utf-8") == (committed / path.relative_to(into)).read_text("utf-8"), path.name
