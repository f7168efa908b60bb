import numpy as np

from sharding import optimal_inclusion
from sharding.client_sampling import mmfl_probabilities


def test_one_model_is_optimal_client_sampling():
    norms = np.array([0.0, 3.0, 1.0, 1.0, 0.2])
    np.testing.assert_allclose(mmfl_probabilities(norms[:, None], 2)[:, 0], optimal_inclusion(norms, 2), rtol=1e-14)


def test_zeros():
    np.testing.assert_allclose(mmfl_probabilities(np.zeros((4, 2)), 2), np.full((4, 2), 0.25))
    p = mmfl_probabilities([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], 2.5)
    np.testing.assert_allclose(p, [[0.25, 0.25], [1, 0], [0, 1]])
