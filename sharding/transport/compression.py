"""Compression: which numbers of a shard are rounded in transport, and how.

`bfloat16` takes two bytes for a number. `int8` takes one: an integer of at most 127, times a power of two that the
numbers of one vector share, which is a singular vector, or all weights of one output in what is sent whole. (That is
block floating point, as in the OCP microscaling formats.) Powers of two do not round, so numbers on this grid are
unchanged when they are sent again, and every machine reads the same bits. Single numbers, such as ω, biases and norms,
are not rounded, nor is anything that is not float32.

The server sends rounded vectors. A client returns its *change*, rounded on its own grid, so that the error is small
relative to the change. The server adds the mean change to its own vectors, so that rounding on the way down does not
enter the model.
"""

from typing import Literal

import torch
from torch import Tensor

from sharding.errors import UserError

EXACT = "float32"
COMPRESSIONS = {EXACT: 32, "bfloat16": 16, "int8": 8}  # bits of a number

LARGEST = 127  # of the integers
LEAST = -126  # the exponent of float32's smallest normal number
NOT_FINITE = -128  # instead of an exponent: the vector has a NaN or Inf

# What a tensor has: which terms, a vector in each column, the weights of an output in each row, or single numbers.
Role = Literal["indices", "columns", "outputs", "numbers"]


def round_columns(matrix: Tensor, compression: str) -> Tensor:
    """Return the nearest vectors on a compression's grid; one with a NaN or Inf is NaN with `int8`.

    Args:
        matrix: a matrix (length, n), one vector per column; returned unchanged unless float32.
        compression: one of `COMPRESSIONS`.
    """
    return matrix if compression == EXACT else _round_rows(matrix.mT, compression).mT


def round_outputs(tensor: Tensor, compression: str) -> Tensor:
    """Return the nearest weights on a compression's grid, those of each output together.

    Args:
        tensor: a tensor (out, …); returned unchanged unless it is float32 and has two or more dimensions.
        compression: one of `COMPRESSIONS`.
    """
    return (
        tensor
        if compression == EXACT or tensor.dim() < 2
        else _round_rows(tensor.flatten(1), compression).view_as(tensor)
    )


def compress(tensor: Tensor, role: Role, compression: str) -> tuple[Tensor, Tensor | None]:
    """Return the tensor to send, rounded to the grid, and the exponents of its vectors, if any.

    On the `meta` device, only types and shapes are returned.
    """
    if compression == EXACT:
        return tensor, None
    if role == "indices":
        return tensor.int(), None
    rows = _vectors(role, tensor) if tensor.dtype == torch.float32 and tensor.numel() else None
    if rows is None:
        return tensor, None
    if compression == "bfloat16":
        return tensor.bfloat16(), None
    integers, exponents = _pack(rows)
    return _restored(integers, role, tensor), exponents


def expand(tensor: Tensor, role: Role, compression: str, exponents: Tensor | None, name: str) -> Tensor:
    """Undo `compress`; the values are on the grid. Raise a UserError if the exponents are not of the tensor `name`."""
    if exponents is not None:
        rows = _vectors(role, tensor) if tensor.dtype == torch.int8 else None
        if rows is None or exponents.dtype != torch.int8 or exponents.shape != rows.shape[:1]:
            raise UserError(f"the scales of {name[:80]!r} are not its own")
        return _restored(_unpack(rows, exponents), role, tensor)
    if role == "indices" and tensor.dtype == torch.int32:
        return tensor.long()
    if compression == "bfloat16" and tensor.dtype == torch.bfloat16 and _vectors(role, tensor) is not None:
        return tensor.float()
    return tensor


def check_compression(compression: object) -> None:
    """Raise a UserError unless there is a compression of this name."""
    if not isinstance(compression, str) or compression not in COMPRESSIONS:
        known, given = ", ".join(COMPRESSIONS), str(compression)[:40]
        raise UserError(f"its numbers are in {given!r}, not in one of {known}")


def _round_rows(rows: Tensor, compression: str) -> Tensor:
    if rows.dtype != torch.float32 or not rows.numel():
        return rows
    return rows.bfloat16().float() if compression == "bfloat16" else _unpack(*_pack(rows))


def _pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers (vectors, length) and exponents (vectors,) of float32 vectors, both int8."""
    if rows.is_meta:
        return rows.to(torch.int8), rows[:, 0].to(torch.int8)
    exponents = _exponents(rows)
    integers = (rows * _power(-exponents)).nan_to_num(0.0, 0.0, 0.0).round()
    return integers.to(torch.int8), exponents.to(torch.int8)


def _unpack(integers: Tensor, exponents: Tensor) -> Tensor:
    """Undo `_pack`: return the vectors (vectors, length), float32."""
    return torch.where(exponents[:, None] != NOT_FINITE, integers.float() * _power(exponents.int()), torch.nan)


def _exponents(rows: Tensor) -> Tensor:
    """Return the least e for which no number of a row is above 127·2^e, or `NOT_FINITE` if none exists, int32."""
    largest = rows.abs().amax(1)
    mantissa, power = torch.frexp(largest)  # in [1/2, 1), so that 64 ≤ 128·mantissa
    exponents = (power - 7 + (mantissa * (LARGEST + 1) > LARGEST).int()).clamp(min=LEAST)
    return torch.where(largest.isfinite(), exponents, NOT_FINITE).int()


def _power(exponents: Tensor) -> Tensor:
    """Return 2^e as float32, one per row, from its bits: `pow` may be off in the last bit."""
    return ((exponents.clamp(LEAST, LARGEST) + 127) << 23).view(torch.float32)[:, None]


def _vectors(role: Role, tensor: Tensor) -> Tensor | None:
    """Return the vectors to round, one per row; None for a tensor that is not rounded."""
    if role == "columns":
        return tensor.mT if tensor.dim() == 2 else None
    return tensor.flatten(1) if role == "outputs" and tensor.dim() > 1 else None


def _restored(rows: Tensor, role: Role, tensor: Tensor) -> Tensor:
    return rows.view_as(tensor) if role == "outputs" else rows.mT
