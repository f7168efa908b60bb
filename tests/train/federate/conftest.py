import pytest


@pytest.fixture(scope="session")
def fork_server():
    """Import nothing beside a federation: its apps have seconds to start."""


@pytest.fixture
def no_waiting(monkeypatch):
    """Look for replies once: nodes without processes answer at once or never."""
    from sharding.flower import exchange, nodes  # Flower is an extra
    from train.federate import roster

    ticks = iter(range(10**6))
    for module in (roster, exchange, nodes):
        monkeypatch.setattr(module, "monotonic", lambda: next(ticks) / 100)
    for module in (nodes, exchange):
        monkeypatch.setattr(module, "sleep", lambda seconds: None)
