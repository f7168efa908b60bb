"""The frozen part of a factorized model, which a client receives once and keeps.

The server's model has weights W = R + L. Shards hold terms of L. R is the same in all rounds, and each shard names the
digest of the residual that it needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sharding.errors import UserError
from sharding.layers import FactorizedLayer
from sharding.modules.wrappers import named_modules
from sharding.transport import serialize

KEY = "residual"  # of the digest in the metadata
_DIGESTS = WeakTensorKeyDictionary()  # of tensors' values, by tensor: the version that was read, and its digest


@dataclass(frozen=True, eq=False)
class Residual:
    """R of every factorized layer that has one.

    Attributes:
        layers: R by layer name, in a format of `sharding.quantization`; never written to.
    """

    layers: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the residual of a model that `factorize` made; it shares the model's memory."""
        parts = {name: part for name, part in named_modules(model) if isinstance(part, FactorizedLayer)}
        return cls({name: part.residual for name, part in parts.items() if part.residual is not None})

    @cached_property
    def digest(self) -> str:
        """A digest of all names, types, shapes and values; empty where there are no layers."""
        if not self.layers:
            return ""
        parts = (
            f"{name} {stored.dtype} {tuple(stored.shape)} ".encode() + _digest(stored)
            for name, stored in sorted(self.layers.items())
        )
        return blake2b(b"\n".join(parts), digest_size=16).hexdigest()

    @property
    def nbytes(self) -> int:
        """The exact length of `to_bytes()`."""
        return serialize.size_of(self.layers, {KEY: self.digest})

    def __repr__(self) -> str:
        return f"Residual(layers={len(self.layers)}, {self.nbytes / 1000:,.0f} kB, digest={self.digest[:7]!r})"

    def to(self, device: torch.device | str) -> "Residual":
        """Return the same values on a device."""
        return Residual({name: stored.to(device) for name, stored in self.layers.items()})

    def to_bytes(self) -> bytes:
        """Return the wire form: a safetensors file with a tensor for each layer, and the digest in its metadata."""
        return serialize.to_bytes(self.layers, {KEY: self.digest})

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read the wire form back, onto the CPU.

        Raises:
            UserError: the bytes are not a residual, or not as they were written.
        """
        return cls._checked(*serialize.from_bytes(data, KEY))

    def write(self, path: Path) -> None:
        """Write the wire form to a file."""
        serialize.to_file(self.layers, {KEY: self.digest}, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of the wire form, onto the CPU; the file is mapped, not copied.

        Raises:
            UserError: the file is not a residual, or not as it was written.
        """
        return cls._checked(*serialize.from_file(path, KEY))

    @classmethod
    def _checked(cls, layers: serialize.Named, metadata: serialize.Metadata) -> Self:
        if KEY not in metadata:
            raise UserError(f"this is not a residual: its metadata has {str(dict(metadata))[:80]}")
        if (residual := cls(layers)).digest != metadata[KEY]:
            raise UserError(
                f"this residual is spoiled: its digest is {residual.digest!r}, not {metadata[KEY][:40]!r}; get it again"
            )
        return residual


def _digest(stored: Tensor) -> bytes:
    """Return a digest of a tensor's values, which are read once as long as they do not change."""
    version, digest = _DIGESTS.get(stored, (None, b""))
    if version != stored._version:
        values = stored.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest = blake2b(values.numpy().data).digest()
        _DIGESTS[stored] = stored._version, digest
    return digest
