"""Matrices in few bits, against a literal transcription and their bound."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding.layers.frozen import StoredMatrix
from sharding.matrices.quantization import Format, dequantize, empty_quantized, format_of, quantize, quantize_terms

FORMATS = get_args(Format)
BITS = {"int4": 4.5, "int8": 8.5, "bfloat16": 16, "float32": 32}


def random_matrix(rows, columns, magnitude=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * magnitude).to(dtype)


def reference(row, largest):
    """One row, number by number."""
    result = []
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        scale = float(torch.tensor(max(abs(value) for value in group) / largest).bfloat16())
        for value in group:
            step = 0 if scale == 0 else max(-largest, min(largest, round(value / scale)))
            result.append(step * scale)
    return result


@pytest.mark.parametrize(("name", "largest"), [("int4", 7), ("int8", 127)])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_quantize_to_integers_equals_the_definition(name, largest, columns):
    matrix = random_matrix(5, columns)
    matrix[2] = 0
    values = dequantize(quantize(matrix, name), columns, torch.float64)
    assert values.tolist() == [reference(row, largest) for row in matrix.tolist()]


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 70),
    power=st.integers(-33, 36),
    name=st.sampled_from(["int4", "int8"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_quantize_to_integers_has_an_error_of_at_most_half_a_scale(rows, columns, power, name, dtype):
    matrix = random_matrix(rows, columns, 10.0**power, dtype)
    stored = quantize(matrix, name)
    scales = stored[..., :2].contiguous().view(torch.bfloat16).double().repeat_interleave(32, dim=1)[:, :columns, 0]
    errors = (dequantize(stored, columns, torch.float64) - matrix.double()).abs()
    assert bool((errors <= scales * 0.5000001).all())
    exact = matrix.double().abs().amax() / {"int4": 7, "int8": 127}[name]
    assert scales.max() <= exact * 1.004


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_storage_has_the_size_and_dtype_of_the_format(name):
    stored = quantize(random_matrix(6, 64), name)
    empty = empty_quantized(6, 64, name, torch.device("meta"))
    assert (stored.shape, stored.dtype) == (empty.shape, empty.dtype)
    assert stored.nbytes * 8 == BITS[name] * 6 * 64
    assert format_of(stored) == name


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_quantize_to_floating_formats_rounds_to_their_dtype(name, dtype):
    matrix = random_matrix(3, 5)
    assert torch.equal(dequantize(quantize(matrix, name), 5, torch.float64), matrix.to(dtype).double())


def test_quantized_buffer_after_a_dtype_change_is_equal():
    matrix = random_matrix(3, 40, 1e-12)
    model = torch.nn.Module()
    model.register_buffer("stored", quantize(matrix, "int4"))
    before = dequantize(model.stored, 40, torch.float64)
    assert torch.equal(dequantize(model.half().double().stored, 40, torch.float64), before)
    assert before.abs().max() > 0


def stored_matrix(name, by_terms, blocks=1):
    """A matrix of blocks of 40×50, or of rank 3."""
    if by_terms:
        stored = quantize_terms(random_matrix(3 * blocks, 40), random_matrix(3 * blocks, 50), name)
    else:
        stored = quantize(random_matrix(40 * blocks, 50), name)
    return StoredMatrix(stored, 40, 50, blocks, by_terms)


@pytest.mark.parametrize("by_terms", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_products_with_a_stored_matrix_equal_those_with_the_dense_one(name, by_terms):
    stored = stored_matrix(name, by_terms)
    matrix = stored.dense(torch.float64)
    assert matrix.shape == (40, 50)
    for x, product, other in (
        (random_matrix(7, 50), stored.linear, lambda x: x @ matrix.mT),
        (random_matrix(7, 40), lambda x: stored.linear(x, transposed=True), lambda x: x @ matrix),
    ):
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.testing.assert_close(product(one), other(two), rtol=0, atol=1e-12)
        product(one).square().sum().backward()
        other(two).square().sum().backward()
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-12)
    rows = torch.tensor([3, 0, 3])
    torch.testing.assert_close(stored.select(rows, torch.float64), matrix[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_stored_terms_of_blocks_are_the_products_of_each_block(name):
    stored = stored_matrix(name, by_terms=True, blocks=2)
    u, v = stored.factors(torch.float64)
    expected = torch.cat([u[:3].mT @ v[:3], u[3:].mT @ v[3:]])
    torch.testing.assert_close(stored.dense(torch.float64), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by_terms", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_stored_matrix_of_another_shape_or_type_is_invalid(name, by_terms):
    valid = stored_matrix(name, by_terms, blocks=2)
    assert valid.is_valid
    stored = valid.stored
    assert replace(valid, stored=stored.half()).is_valid == (stored.dim() == 2)
    for other in (stored[1:], stored[:, 1:], stored.int(), stored[None], stored[0, 0], stored[..., None]):
        assert not replace(valid, stored=other).is_valid
    for changes in ({"rows": 140}, {"columns": 80}, {"blocks": 4}, {"by_terms": not by_terms}):
        assert not replace(valid, **changes).is_valid
