"""What runs in the tests are made of."""

from collections.abc import Callable
from pathlib import Path

import pytest

from train.config.schema import Config, load_config


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch, fork_server: None) -> None:
    """Leave no handler behind where a command is run in this process."""
    monkeypatch.setattr("logging.basicConfig", lambda **how: None)


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
