"""The frozen part of a model, which a client receives once and keeps.

The server's model has weights W = R + L. Shards hold terms of L. R is the same in all rounds, and so are frozen
parameters, such as the embeddings of a language model. Each shard names the digest of the frozen part that it needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sharding.errors import UserError
from sharding.layers.base import factorized_layers, residual_layers
from sharding.matrices.values import as_real
from sharding.modules.copies import load
from sharding.modules.state import whole_state
from sharding.modules.wrappers import named_state
from sharding.transport import serialize

KEY = "residual"  # of the digest in the metadata
NAME = "frozen part"  # in messages
LAYERS, PARAMETERS = "layers/", "dense/"  # begin the keys of the file
_DIGESTS = WeakTensorKeyDictionary()  # of tensors' values, by tensor: the version that was read, and its digest


@dataclass(frozen=True, eq=False)
class Frozen:
    """What is frozen: R of every factorized layer that has one, and the parameters that do not train.

    Its length is the number of these tensors; one without any needs not be sent.

    Attributes:
        residuals: R by layer name, in a format of `sharding.matrices.quantization`; never written to.
        parameters: frozen parameters that are not those of sharded layers, by name in the state dict; never written to.
    """

    residuals: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, sharded: Mapping[str, nn.Module] | None = None) -> Self:
        """Return the frozen part of a model; it shares the model's memory.

        Args:
            model: a server's or a client's.
            sharded: the layers whose terms are sent, by name (`ShardPlanner.sharded_layers`); by default the factorized
                layers, as in every client's model.
        """
        sharded = factorized_layers(model) if sharded is None else sharded
        return cls(residual_layers(model), whole_state(model, sharded)[1])

    @cached_property
    def digest(self) -> str:
        """The digests of `residuals` and of `parameters`, joined by a dash; empty without any tensors."""
        return "-".join([digest_of(self.residuals), digest_of(self.parameters)]) if len(self) else ""

    @property
    def nbytes(self) -> int:
        """The exact length of `to_bytes()`."""
        return serialize.size_of(self._named_tensors(), {KEY: self.digest})

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.residuals) + len(self.parameters)

    def __repr__(self) -> str:
        counts = f"residuals={len(self.residuals)}, parameters={len(self.parameters)}"
        return f"Frozen({counts}, {self.nbytes / 1000:,.0f} kB, digest={self.digest[:7]!r})"

    def to(self, device: torch.device | str) -> "Frozen":
        """Return the same values on a device."""
        residuals, parameters = (
            {name: tensor.detach().to(device) for name, tensor in part.items()}
            for part in (self.residuals, self.parameters)
        )
        return Frozen(residuals, parameters)

    @torch.no_grad()
    def load_into(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Let a client's model on the `meta` device use these tensors, moved to a device.

        Its factorized layers get R, or none. Those in `parameters` are frozen.

        Raises:
            UserError: a tensor does not fit the model.
        """
        for name, layer in factorized_layers(model).items():
            stored = self.residuals.get(name)
            if stored is not None and not layer.can_add(stored, by_terms=False):
                raise UserError(f"the residual of {name}, {_form(stored)}, does not fit this {layer}")
            layer.residual = None if stored is None else stored.to(device)
        state = named_state(model)
        for name, value in self.parameters.items():
            entry = state.get(name)
            if not isinstance(entry, nn.Parameter) or as_real(entry).shape != value.shape:
                raise UserError(f"the frozen part has {name}, {_form(value)}; the model has not")
            entry.requires_grad_(False)
        load(model, ((state[name], value.detach().to(device)) for name, value in self.parameters.items()), copy=False)

    def to_bytes(self) -> bytes:
        """Return the wire form: a safetensors file with keys ``layers/<layer>`` and ``dense/<name>``.

        Its metadata has the digest.
        """
        return serialize.to_bytes(self._named_tensors(), {KEY: self.digest})

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read the wire form back, onto the CPU.

        Raises:
            UserError: the bytes are not a frozen part, or not as they were written.
        """
        return cls._checked(*serialize.from_bytes(data, NAME))

    def write(self, path: Path | str) -> None:
        """Write the wire form to a file."""
        serialize.to_file(self._named_tensors(), {KEY: self.digest}, path)

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a file of the wire form, onto the CPU; the file is mapped, not copied.

        Raises:
            UserError: the file is not a frozen part, or not as it was written.
        """
        return cls._checked(*serialize.from_file(path, NAME))

    def _named_tensors(self) -> dict[str, Tensor]:
        named = {LAYERS: self.residuals, PARAMETERS: self.parameters}
        return {f"{kind}{name}": tensor.detach() for kind, part in named.items() for name, tensor in part.items()}

    @classmethod
    def _checked(cls, tensors: serialize.Named, metadata: serialize.Metadata) -> Self:
        if KEY not in metadata:
            raise UserError(f"this is not a frozen part: its metadata has {str(dict(metadata))[:80]}")
        if other := [name for name in tensors if not name.startswith((LAYERS, PARAMETERS))]:
            raise UserError(f"this is not a frozen part: unknown entry {other[0][:80]!r}")
        parts = (
            {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in (LAYERS, PARAMETERS)
        )
        if (frozen := cls(*parts)).digest != metadata[KEY]:
            raise UserError(f"it is spoiled: its digest is {frozen.digest!r}, not {metadata[KEY][:40]!r}; get it again")
        return frozen


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, types, shapes and values; of tensors on the `meta` device, without values."""
    parts = (
        f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + _digest(tensor)
        for name, tensor in sorted(tensors.items())
    )
    return blake2b(b"\n".join(parts), digest_size=16).hexdigest()


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's values, which are read once as long as they do not change."""
    if tensor.is_meta:
        return b""
    now = None if tensor.is_inference() else (tensor._version, tensor.data_ptr())  # one of inference has no version
    then, digest = _DIGESTS.get(tensor, (None, b""))
    if now is None or then != now:
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest = blake2b(values.numpy().data).digest()
        _DIGESTS[tensor] = now, digest
    return digest
