"""Store a frozen matrix in few bits: ``int4``, ``int8``, ``bfloat16`` or ``float32``.

With ``int4`` and ``int8`` each row is divided into groups of 32 numbers, the last one padded with zeros. The scale s of
a group is its largest magnitude divided by 7 or 127, and a number is stored as the nearest integer multiple of s. So
its error is at most s/2. A number takes 4.5 or 8.5 bits, scale included.

Frozen singular terms are stored as their factors: a row for each term, which holds u' and then v', each in groups of
its own.

One tensor of bytes holds integers and scales, with shape (rows, groups, 2 + 16) or (rows, groups, 2 + 32): first the
scale in bfloat16, then the integers. In ``int4`` byte j of a group holds number j in its low half and number j + 16 in
its high half, each plus 8. Changing the dtype of a model, as `model.half()` does, leaves such a tensor alone. bfloat16
has the range of float32, so that scales neither overflow nor underflow.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from sharding.errors import UserError, safe_repr

Format = Literal["int4", "int8", "bfloat16", "float32"]

GROUP = 32  # numbers that share a scale
SCALE = 2  # bytes of a scale
LARGEST = {"int4": 7, "int8": 127}
PLAIN = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def check_format(name: object, what: str) -> None:
    """Raise a UserError if what has this name is not a format."""
    if name not in get_args(Format):
        raise UserError(f"{what} is {safe_repr(name)}; it is one of {', '.join(get_args(Format))}, or None")


def format_of(stored: Tensor) -> Format:
    """Return the format of a stored matrix; one that was cast from bfloat16 to another dtype counts as float32."""
    if stored.dim() == 2:
        return "bfloat16" if stored.dtype == torch.bfloat16 else "float32"
    return "int8" if stored.shape[2] == SCALE + GROUP else "int4"


def empty_quantized(rows: int, columns: int, name: Format, device: torch.device) -> Tensor:
    """Return the storage of a matrix, without values."""
    if name in PLAIN:
        return torch.empty(rows, columns, dtype=PLAIN[name], device=device)
    group = SCALE + (GROUP // 2 if name == "int4" else GROUP)
    return torch.empty(rows, -(-columns // GROUP), group, dtype=torch.uint8, device=device)


def quantize(matrix: Tensor, name: Format) -> Tensor:
    """Store a matrix (rows, columns) of finite real numbers; see the module for the layout."""
    if name in PLAIN:
        return matrix.to(PLAIN[name])
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scales = (padded.abs().amax(-1, keepdim=True) / LARGEST[name]).bfloat16()
    scaled = padded / scales.to(padded.dtype).where(scales > 0, 1.0)
    integers = scaled.round().clamp(-LARGEST[name], LARGEST[name]).to(torch.int8)
    if name == "int4":
        low, high = (integers + 8).view(torch.uint8).chunk(2, dim=-1)
        integers = low | high << 4
    return torch.cat([scales.view(torch.uint8), integers.view(torch.uint8)], dim=-1)


def dequantize(stored: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix (rows, columns) that `quantize` stored."""
    if stored.dim() == 2:
        return stored.to(dtype)
    scales, integers = torch.view_copy(stored[..., :SCALE], torch.bfloat16), stored[..., SCALE:]  # can be traced
    if integers.shape[-1] < GROUP:
        values = torch.cat([integers & 15, integers >> 4], dim=-1).to(dtype).sub_(8)
    else:
        values = torch.view_copy(integers, torch.int8).to(dtype)
    return values.mul_(scales.to(dtype)).flatten(1)[:, :columns]


def quantize_terms(u: Tensor, v: Tensor, name: Format) -> Tensor:
    """Store terms by their factors u (n, rows) and v (n, columns), a term per row."""
    return torch.cat([quantize(u, name), quantize(v, name)], dim=1)


def split_terms(stored: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the stored factors, (n, rows) and (n, columns), of terms that `quantize_terms` stored; as views."""
    length = stored_length(stored, rows)
    return stored[:, :length], stored[:, length:]


def stored_length(stored: Tensor, numbers: int) -> int:
    """Return the length of a row of so many numbers in the format of a stored tensor: in numbers, or in groups."""
    return numbers if stored.dim() == 2 else -(-numbers // GROUP)


def is_stored(tensor: Tensor) -> bool:
    """Whether a tensor is in a format: of integers, or of floating type, which casting a model can change."""
    if tensor.dim() == 2:
        return tensor.is_floating_point()
    sizes = (SCALE + GROUP // 2, SCALE + GROUP)
    return tensor.dim() == 3 and tensor.dtype == torch.uint8 and tensor.shape[2] in sizes
