import pytest

from train.run import threads


@pytest.fixture(autouse=True)
def one_thread():
    """As many threads as a run has; rounding depends on them."""
    with threads(1):
        yield
