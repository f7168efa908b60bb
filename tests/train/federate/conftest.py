import pytest


@pytest.fixture
def no_waiting(monkeypatch):
    """Look for replies once: nodes without processes answer at once or never."""
    from train.federate import roster  # Flower is an extra

    monkeypatch.setattr(roster, "sleep", lambda seconds: None)
    ticks = iter(range(10**6))
    monkeypatch.setattr(roster, "monotonic", lambda: next(ticks) / 100)
