"""Where the real data lies, for the tests that read some of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from train.config import Config, load_config

ROOT = Path(os.environ.get("SHARDING_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Return the folder of real data, or skip the test where a dataset is not in it."""

    def find(folder: str) -> Path:
        if not (ROOT / folder).is_dir():
            pytest.skip(f"no {folder} under {ROOT.resolve()}; set SHARDING_DATA to the folder that holds it")
        return ROOT

    return find


@pytest.fixture
def flower_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the server of a run, as messages want to know."""
    TaskIdentity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Return a small configuration of four clients with unequal keep ratios, with overrides."""

    def make(*overrides: str) -> Config:
        path = tmp_path / "small.yaml"
        path.write_text(
            "{name: small, rounds: 2, engine: sequential, model: {name: mlp, hidden: [32, 16]}, data: {name: digits}, "
            "clients: {count: 4, per_round: 3}, keep_ratio: {0.25: 0.5, 0.5: 0.5}, local: {epochs: 1}}"
        )
        return load_config(path, [f"output={tmp_path / 'run'}", *overrides])

    return make
