"""AOCS: the published algorithm, its limit, and that the server reads only sums over clients."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sharding import optimal_inclusion
from sharding.client_sampling import aocs_probabilities, plain_sum
from tests.sharding.client_sampling import reference

NORMS = st.lists(st.one_of(st.floats(1e-6, 1e3), st.just(1.0)), min_size=1, max_size=12).map(np.array)


class Private(np.ndarray):
    """One number per client: only elementwise operations are allowed, others would reveal single clients."""

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or ufunc.signature is not None:
            raise AssertionError(f"{ufunc.__name__}.{method} mixes clients")
        plain = [value.view(np.ndarray) if isinstance(value, Private) else value for value in inputs]
        return ufunc(*plain, **kwargs).view(Private)

    def __array_function__(self, function, types, args, kwargs):
        if function is not np.where:
            raise AssertionError(f"numpy.{function.__name__} mixes clients")
        plain = [value.view(np.ndarray) if isinstance(value, Private) else value for value in args]
        return np.where(*plain).view(Private)

    def leak(self, *args, **kwargs):
        raise AssertionError("the server looked at single clients")

    __getitem__ = __iter__ = __float__ = __bool__ = tolist = item = sum = max = min = mean = sort = argsort = leak


def spy_sum(values):
    assert isinstance(values, Private)
    return float(np.sum(values.view(np.ndarray)))


@given(NORMS, st.floats(0.01, 1))
def test_aocs_probabilities_with_private_norms_reads_only_their_sums(norms, share):
    budget = share * norms.size
    probabilities = aocs_probabilities(norms.view(Private), budget, spy_sum).view(np.ndarray)
    np.testing.assert_array_equal(probabilities, aocs_probabilities(norms, budget, plain_sum))


@given(NORMS, st.floats(0.01, 1), st.integers(1, 6))
def test_aocs_probabilities_of_any_norms_equal_algorithm_2(norms, share, iterations):
    budget = share * norms.size
    np.testing.assert_allclose(
        aocs_probabilities(norms, budget, plain_sum, iterations),
        reference.aocs(norms.tolist(), budget, iterations),
        rtol=1e-9,
        atol=1e-12,
    )


@given(NORMS, st.floats(0.01, 0.99))
def test_aocs_probabilities_with_enough_iterations_are_optimal(norms, share):
    budget = share * norms.size
    p = aocs_probabilities(norms, budget, plain_sum, max_iterations=norms.size + 1)
    np.testing.assert_allclose(p, optimal_inclusion(norms, budget), rtol=1e-9)


def test_aocs_probabilities_with_zero_norms_or_full_budget_are_exact():
    np.testing.assert_array_equal(aocs_probabilities(np.zeros(4), 3, plain_sum), np.full(4, 0.75))
    np.testing.assert_array_equal(aocs_probabilities(np.array([0.0, 2, 0, 1]), 3, plain_sum), [0.5, 1, 0.5, 1])
    np.testing.assert_array_equal(aocs_probabilities(np.array([3.0, 1.0]), 2, plain_sum), [1, 1])
    np.testing.assert_array_equal(aocs_probabilities(np.array([5.0]), 1, plain_sum), [1])
