import numpy as np

from sharding.client_sampling import mmfl_probabilities


def test_zeros():
    np.testing.assert_allclose(mmfl_probabilities(np.zeros((4, 2)), 2), np.full((4, 2), 0.25))
    p = mmfl_probabilities([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], 2.5)
    np.testing.assert_allclose(p, [[0.25, 0.25], [1, 0], [0, 1]])
