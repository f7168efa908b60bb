import pytest


@pytest.fixture
def no_waiting(monkeypatch):
    """Look for replies once: nodes without processes answer at once or never."""
    from train.federate import nodes  # Flower is an extra

    monkeypatch.setattr(nodes, "sleep", lambda seconds: None)
    ticks = iter(range(10**6))
    monkeypatch.setattr(nodes, "monotonic", lambda: next(ticks) / 100)
