"""What travels between server and client: the singular terms of the sharded layers, and the dense rest.

All index arithmetic is here: cutting terms out of a spectrum, and saying which columns a returned vector belongs to.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sharding.layers import FactorizedLayer
from sharding.spectrum import Spectrum

PARTS = ("indices", "u", "v", "multipliers")
_WIRE_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True)
class Terms:
    """The singular terms of one layer that one client holds.

    Attributes:
        indices: which terms of the spectrum, ascending, shape (n,), int64.
        u: u' of these terms, shape (out, n).
        v: v' of these terms, shape (in, n).
        multipliers: ω of these terms, shape (n,).
    """

    indices: Tensor
    u: Tensor
    v: Tensor
    multipliers: Tensor

    @classmethod
    def cut(cls, spectrum: Spectrum, indices: NDArray[np.int64], multipliers: NDArray[np.float64]) -> list[Self]:
        """Cut the terms of several clients out of a spectrum in one gather per factor.

        Args:
            spectrum: the layer's.
            indices: shape (clients, n).
            multipliers: ω, shape (clients, n).
        """
        num_terms, device = indices.shape[1], spectrum.u.device
        rows = torch.from_numpy(indices).to(device)
        flat = rows.flatten()
        us = (part.mT for part in spectrum.u.mT.index_select(0, flat).split(num_terms))
        vs = (part.mT for part in spectrum.v.mT.index_select(0, flat).split(num_terms))
        omegas = torch.from_numpy(multipliers).to(device, spectrum.u.dtype)
        return [cls(*parts) for parts in zip(rows, us, vs, omegas, strict=True)]


@dataclass(frozen=True)
class Shard:
    """One client's part of the model in one round.

    Attributes:
        terms: by layer name.
        dense: everything else of floating point in the state dict (first and last layers, norms, biases, embeddings),
            by state-dict key. The shards of a round share these tensors; nobody writes to them.
    """

    terms: Mapping[str, Terms]
    dense: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """The exact length of `to_bytes()`, told without making it."""
        tensors = self._named_tensors()
        # Safetensors orders by decreasing alignment of the type, then by name.
        order = sorted(tensors, key=lambda name: (-_alignment_rank(tensors[name].dtype), name))
        header, offset = {}, 0
        for name in order:
            end = offset + tensors[name].numel() * tensors[name].element_size()
            shape = list(tensors[name].shape)
            header[name] = {
                "dtype": _WIRE_TYPES[tensors[name].dtype],
                "shape": shape,
                "data_offsets": [offset, end],
            }
            offset = end
        text = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
        return 8 + -(-text // 8) * 8 + offset

    def to_bytes(self) -> bytes:
        """Return the wire form: a safetensors file with keys ``terms/<layer>/<part>`` and ``dense/<name>``."""
        return safetensors.torch.save({name: tensor.contiguous() for name, tensor in self._named_tensors().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the wire form back, onto the CPU."""
        return cls._from_named(safetensors.torch.load(data))

    @classmethod
    def _from_named(cls, tensors: Mapping[str, Tensor]) -> Self:
        layers = sorted(
            {name.removeprefix("terms/").rpartition("/")[0] for name in tensors if name.startswith("terms/")}
        )
        return cls(
            {layer: Terms(*(tensors[f"terms/{layer}/{part}"] for part in PARTS)) for layer in layers},
            {name.removeprefix("dense/"): tensor for name, tensor in tensors.items() if name.startswith("dense/")},
        )

    def write(self, path: Path) -> None:
        """Write the wire form to a file."""
        safetensors.torch.save_file({name: part.contiguous() for name, part in self._named_tensors().items()}, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of the wire form, onto the CPU; its contents are mapped, not copied."""
        return cls._from_named(safetensors.torch.load_file(path))

    def to(self, device: torch.device | str) -> "Shard":
        """Return the same values on a device."""
        terms = {name: Terms(*(getattr(held, part).to(device) for part in PARTS)) for name, held in self.terms.items()}
        return Shard(terms, {name: tensor.to(device) for name, tensor in self.dense.items()})

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copy this shard's values into a model factorized for the same keep ratio."""
        for name, terms in self.terms.items():
            layer = _factorized_layer(model, name)
            layer.u.copy_(terms.u)
            layer.v.copy_(terms.v)
            layer.multipliers.copy_(terms.multipliers)
        state = model.state_dict(keep_vars=True)
        for name, tensor in self.dense.items():
            state[name].copy_(tensor)

    @torch.no_grad()
    def read_from(self, model: nn.Module) -> "Shard":
        """Return what training made of this shard: the same terms and names, with the model's present values."""
        terms = {}
        for name, sent in self.terms.items():
            layer = _factorized_layer(model, name)
            terms[name] = Terms(sent.indices, layer.u.detach().clone(), layer.v.detach().clone(), sent.multipliers)
        state = model.state_dict()
        return Shard(terms, {name: state[name].clone() for name in self.dense})

    def trained(self) -> dict[str, Tensor]:
        """Return what a client may change: u and v of every layer, as ``<layer>.<part>``, and the dense rest."""
        factors = {f"{layer}.{part}": getattr(terms, part) for layer, terms in self.terms.items() for part in "uv"}
        return factors | dict(self.dense)

    def _named_tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"terms/{layer}/{part}": getattr(terms, part) for layer, terms in self.terms.items() for part in PARTS
        }
        return tensors | {f"dense/{name}": tensor for name, tensor in self.dense.items()}


def update_norm(sent: Shard, returned: Shard) -> Tensor:
    """Return ‖U‖, a scalar on the device: the change of every vector u', v' and dense parameter that a client holds.

    It is what client sampling weighs clients by. NaN or Inf in the update shows in the norm. The sum goes by name
    and row, so that an update gives the same bits whether it has travelled or not.
    """
    before, after = sent.trained(), returned.trained()
    changes = ((after[name] - before[name]).double().contiguous() for name in sorted(after))
    return torch.stack([change.square().sum() for change in changes]).sum().sqrt()


def dense_state(model: nn.Module, sharded: Mapping[str, object]) -> dict[str, Tensor]:
    """Return a snapshot of what is sent whole: the floating-point state but the weights of the sharded layers."""
    weights = {f"{name}.weight" for name in sharded}
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name not in weights and tensor.is_floating_point()
    }


def _factorized_layer(model: nn.Module, name: str) -> FactorizedLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, FactorizedLayer), f"{name} is a {type(layer).__name__}, not a factorized layer"
    return layer


def _alignment_rank(dtype: torch.dtype) -> int:
    return list(reversed(_WIRE_TYPES)).index(dtype)
