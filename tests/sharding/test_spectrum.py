"""Decomposition against torch's SVD, and spectra whose squares would lose precision."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from sharding.matrices.spectrum import all_terms, compose, decompose, decompose_batch, map_threads
from tests.sharding.models import decompose_one

CPU = torch.device("cpu")
SHAPES = [(5, 9), (9, 5), (6, 6), (1, 4), (4, 1), (1, 1), (64, 576)]


def falling(smallest, count):
    """Numbers that fall geometrically from 1 to `smallest`, float64."""
    return torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), count, dtype=torch.float64)


def graded(out, columns, smallest):
    """Return a matrix whose singular values fall geometrically from 1 to `smallest`; out ≤ columns."""
    left, _ = torch.linalg.qr(torch.randn(out, out, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64))
    return (left * falling(smallest, out)) @ right[:, :out].mT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decompose_of_any_shape_equals_the_svd(shape, dtype):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=dtype)
    spectrum = decompose_one(matrix)
    precision, expected = torch.finfo(dtype).eps, torch.linalg.svdvals(matrix.double())
    torch.testing.assert_close(spectrum.magnitudes, expected, rtol=1e-9, atol=0)
    made = compose(spectrum.u, spectrum.v)
    torch.testing.assert_close(made, matrix, rtol=0, atol=20 * precision * matrix.norm().item())
    # u' and v' carry √λ each and are orthogonal among themselves.
    for factor in (spectrum.u, spectrum.v):
        gram = (factor.mT @ factor).double()
        torch.testing.assert_close(gram, expected.diag(), rtol=0, atol=50 * precision * expected[0].item())


@pytest.mark.parametrize("smallest", [1e-3, 1e-6, 1e-9])
def test_decompose_of_a_steep_spectrum_keeps_small_terms(smallest):
    torch.manual_seed(0)
    matrix = graded(20, 50, smallest)
    spectrum = decompose_one(matrix)
    expected = falling(smallest, 20)
    # An SVD's error is absolute, 1e-16 of the largest; squaring would leave 1e-16/smallest².
    torch.testing.assert_close(spectrum.magnitudes, expected, rtol=max(1e-9, 1e-14 / smallest), atol=0)
    unit = spectrum.v / spectrum.magnitudes.sqrt()
    torch.testing.assert_close(unit.mT @ unit, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-4)


def test_decompose_of_mixed_shapes_keeps_names_order_and_dtypes():
    torch.manual_seed(0)
    matrices = {"a": torch.randn(3, 4), "b": torch.randn(4, 3), "c": torch.randn(3, 4), "d": torch.randn(3, 4).double()}
    spectra = decompose(matrices)
    assert list(spectra) == list(matrices)
    for name, matrix in matrices.items():
        torch.testing.assert_close(compose(spectra[name].u, spectra[name].v), matrix)
        assert spectra[name].u.dtype == matrix.dtype
        assert spectra[name].magnitudes.dtype == torch.float64


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_decompose_of_a_zero_matrix_has_a_nonzero_trainable_side(shape):
    spectrum = decompose_one(torch.zeros(shape))
    assert spectrum.magnitudes.eq(0).all()
    assert compose(spectrum.u, spectrum.v).eq(0).all()
    # One side is zero and the other has unit columns, so the zero side has a gradient.
    norms = torch.stack([spectrum.u.norm(dim=0), spectrum.v.norm(dim=0)]).sort(dim=0).values
    torch.testing.assert_close(norms, torch.tensor([[0.0], [1.0]]).expand(2, 4))


def test_decompose_of_a_rank_deficient_matrix_has_exact_zeros():
    torch.manual_seed(0)
    matrix = torch.randn(6, 2, dtype=torch.float64) @ torch.randn(2, 8, dtype=torch.float64)
    spectrum = decompose_one(matrix)
    assert (spectrum.magnitudes > 0).tolist() == [True, True, False, False, False, False]
    torch.testing.assert_close(compose(spectrum.u, spectrum.v), matrix)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (2, 4, 6)])
def test_decompose_with_negative_zeros_of_lapack_returns_positive_ones(shape, monkeypatch):
    """LAPACK's SVD returns −0.0 for some matrices without full rank."""
    svd = torch.linalg.svd

    def signed(matrix, full_matrices):
        left, magnitudes, right = svd(matrix, full_matrices=full_matrices)
        return left, torch.where(magnitudes > 1e-9, magnitudes, -0.0), right

    monkeypatch.setattr(torch.linalg, "svd", signed)
    matrix = torch.zeros(shape)
    matrix[..., 0, 0] = 1
    magnitudes = decompose_one(matrix).magnitudes
    assert magnitudes.count_nonzero() == 1
    assert not magnitudes.signbit().any()


def test_spectrum_of_some_terms_has_the_columns_of_all():
    torch.manual_seed(0)
    chosen = torch.tensor([0, 2])
    for matrix in (torch.randn(4, 6), torch.randn(6, 4), torch.randn(3, 4, 6)):
        (spectrum, complete) = decompose_batch([matrix, matrix], [lambda magnitudes: chosen, all_terms])
        assert torch.equal(spectrum.magnitudes, complete.magnitudes)
        assert torch.equal(spectrum.indices, chosen)
        assert torch.equal(spectrum.u, complete.u[:, chosen])
        assert torch.equal(spectrum.v, complete.v[:, chosen])


def test_decompose_under_autocast_is_equal():
    torch.manual_seed(0)
    matrices = {"wide": torch.randn(4, 6), "tall": torch.randn(6, 4)}
    expected = decompose(matrices)
    with torch.autocast("cpu", torch.bfloat16):
        actual = decompose(matrices)
    for name in matrices:
        assert torch.equal(actual[name].u, expected[name].u)
        assert torch.equal(actual[name].v, expected[name].v)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


SAME_BITS = """
import torch
from sharding.matrices.spectrum import decompose

torch.manual_seed(0)
matrices = {str(size): torch.randn(size, 200).double() for size in (200, 150, 90, 20)}
for chosen in (matrices, {"150": matrices["150"]}):
    torch.set_num_threads(1)
    alone = decompose(chosen)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for name, spectrum in decompose(chosen).items():
            assert torch.equal(spectrum.magnitudes, alone[name].magnitudes), (threads, name)
            assert torch.equal(spectrum.u, alone[name].u), (threads, name)
        assert torch.get_num_threads() == threads
"""


def test_decompose_with_any_number_of_threads_has_the_same_bits():
    """In a process whose new threads may use several cores, which OMP_NUM_THREADS=1 forbids here."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", SAME_BITS], env=environment, check=True)


def test_map_threads_with_an_error_raises_and_restores_num_threads(two_threads):
    def fails(name):
        raise ValueError(name)

    with pytest.raises(ValueError, match="a"):
        list(map_threads(fails, ["a", "b"], [CPU]))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("devices", "threaded"), [([CPU], True), ([CPU, torch.device("meta")], False)])
def test_map_threads_starts_threads_for_the_cpu_only(two_threads, devices, threaded):
    """On a GPU, several threads that call `torch.linalg` first at the same time fail."""
    used = set(map_threads(lambda _: threading.get_ident(), range(4), devices))
    assert (threading.get_ident() not in used) is threaded
