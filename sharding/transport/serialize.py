"""Named tensors and metadata as a safetensors file, and its exact length in advance."""

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from sharding.errors import UserError, safe_repr

Named = Mapping[str, Tensor]
Metadata = Mapping[str, str]

LONGEST_HEADER = 2**22  # bytes, enough for 30,000 tensors; more would take long to read
MOST_DIMENSIONS, LONGEST_SIDE = 64, 2**40  # of a shape from another machine; torch allows no more dimensions
TYPES = {  # in the order of a file: by decreasing alignment, then in the format's order
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def size_of(tensors: Named, metadata: Metadata) -> int:
    """Return the exact length of `to_bytes` for the same arguments."""
    # Safetensors orders by type, then by name.
    rank = {dtype: order for order, dtype in enumerate(TYPES)}
    order = sorted(tensors, key=lambda name: (rank[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": TYPES[tensors[name].dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-text // 8) * 8 + offset


def to_bytes(tensors: Named, metadata: Metadata) -> bytes:
    """Return a safetensors file."""
    return safetensors.torch.save(_contiguous(tensors), dict(metadata))


@torch.inference_mode(False)  # a client trains with what is read, in whatever mode that was
def from_bytes(data: bytes | bytearray | memoryview, what: str = "shard") -> tuple[Named, Metadata]:
    """Read a safetensors file, onto the CPU, or raise a UserError that calls it `what`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UserError(f"a {type(data).__name__} is not a {what}; the bytes that to_bytes returned are needed")
    data = bytes(data)
    try:
        metadata = _metadata(BytesIO(data))
        return safetensors.torch.load(data), metadata
    except Exception as error:  # the parser raises many kinds of errors
        raise UserError(f"these {len(data)} bytes are not a {what}: {_in_short(error)}") from error


def to_file(tensors: Named, metadata: Metadata, path: Path | str) -> None:
    """Write a safetensors file."""
    safetensors.torch.save_file(_contiguous(tensors), path, dict(metadata))


@torch.inference_mode(False)  # as `from_bytes`
def from_file(path: Path | str, what: str = "shard") -> tuple[Named, Metadata]:
    """Read a safetensors file, onto the CPU, or raise a UserError that calls it `what`; it is mapped, not copied."""
    try:
        with Path(path).open("rb") as file:
            metadata = _metadata(file)
        return safetensors.torch.load_file(path), metadata
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {error.strerror}") from error
    except Exception as error:  # the parser raises many kinds of errors
        raise UserError(f"{path} is not a {what}: {_in_short(error)}") from error


def _contiguous(tensors: Named) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _metadata(file: BinaryIO) -> dict[str, str]:
    """Return the metadata in the header: 8 bytes with its length, then JSON.

    Raise a ValueError if the header is too long, or its metadata are not texts by name.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes, and more than {LONGEST_HEADER} are not read")
    metadata = json.loads(file.read(length))["__metadata__"]
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"metadata that are not texts by name, {safe_repr(metadata)}")
    return metadata


def shapes_in(text: object) -> dict[str, dict[str, list[int]]]:
    """Read shapes by group and name from JSON that another machine wrote.

    Raise a ValueError if it is too long, or a shape is not a short list of numbers that a tensor can have.
    """
    if not isinstance(text, str) or len(text) > LONGEST_HEADER:
        raise ValueError(f"shapes in a {type(text).__name__}, or in more than {LONGEST_HEADER} letters")
    groups: dict[str, dict[str, list[int]]] = json.loads(text)
    for shape in (shape for named in groups.values() for shape in named.values()):
        is_list = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS
        if not is_list or not all(type(length) is int and 0 <= length <= LONGEST_SIDE for length in shape):
            raise ValueError(f"the shape {safe_repr(shape)}")
    return groups


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
