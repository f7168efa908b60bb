import numpy as np
import pytest

from sharding import UserError, optimal_inclusion
from sharding.client_sampling import mmfl_probabilities


def test_one_model_is_optimal_client_sampling():
    norms = np.array([0.0, 3.0, 1.0, 1.0, 0.2])
    np.testing.assert_allclose(mmfl_probabilities(norms[:, None], 2)[:, 0], optimal_inclusion(norms, 2), rtol=1e-14)


def test_zeros():
    np.testing.assert_allclose(mmfl_probabilities(np.zeros((4, 2)), 2), np.full((4, 2), 0.25))
    p = mmfl_probabilities([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], 2.5)
    np.testing.assert_allclose(p, [[0.25, 0.25], [1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("norms", "budget", "message"),
    [
        (np.ones((3, 2)), 4, "budget is 4"),
        (np.ones(3), 1, "one row a client"),
        (np.ones((3, 0)), 1, "one column a model"),
        ([[1.0, np.nan]], 1, r"norms\[0, 1\] is nan"),
        ([[1.0], [-1.0]], 1, r"norms\[1, 0\] is -1"),
    ],
)
def test_bad_input_is_told_in_one_line(norms, budget, message):
    with pytest.raises(UserError, match=message) as error:
        mmfl_probabilities(norms, budget)
    assert "\n" not in str(error.value)
