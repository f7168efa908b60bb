"""Checkpoints of the server's model, from which an interrupted run resumes.

Every random number is keyed by its round, and local optimizers start fresh each round. So the state consists of the
model, the number of finished rounds, the server's optimizer, the average of the models, and what the sampler has
learned about the clients. The last two checkpoints are kept, each with a checksum. If the newer one is damaged, or
ahead of the metrics because the process died between the two writes, the run resumes from the older one, with the same
result.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.rounds.failures import one_line
from train.rundir.file_names import CHECKPOINT_FILE, PREVIOUS_FILE
from train.utils.files import write_atomically
from train.utils.jsonl import from_json

log = logging.getLogger(__name__)

KEY = "checkpoint"
STATE_PREFIX = "."  # prefix of names that are not the model's: no part of a tensor's name is empty


class Stateful(Protocol):
    """State that is saved with the model: a server's or a sampler's."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Restore them."""


States = Mapping[str, Stateful]  # by ``server/<model>``, and ``sampler``
NO_STATES: States = {}


class DamagedError(Exception):
    """A checkpoint cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A model after some rounds.

    Attributes:
        rounds: number of finished rounds.
        state: the tensors of the model, by name; of the servers, as ``.server/<model>/<entry of Server.state_dict()>``;
            and of the sampler, as ``.sampler/<entry>``, if it learns.
    """

    rounds: int
    state: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, rounds: int, states: States = NO_STATES) -> Self:
        """Return the checkpoint of a model after this number of rounds."""
        tensors: dict[str, Tensor] = dict(model.state_dict())
        for name, stateful in states.items():
            tensors |= {f"{STATE_PREFIX}{name}/{entry}": tensor for entry, tensor in stateful.state_dict().items()}
        return cls(rounds, cpu_copies(tensors))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file, or raise a DamagedError if it is not a checkpoint, or is truncated or altered."""
        try:
            header = metadata_of(path, KEY)
            with safetensors.safe_open(path, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            read = cls(int(header["rounds"]), state)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
            raise DamagedError(f"it is not a complete checkpoint ({type(error).__name__}: {error})") from error
        if read.rounds < 0:
            raise DamagedError(f"its number of rounds is {read.rounds}")
        if header.get("checksum") != read.checksum():
            raise DamagedError("its content has changed: the checksum differs")
        return read

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        header = {"rounds": self.rounds, "checksum": self.checksum()}
        return safetensors.torch.save(self.state, {KEY: json.dumps(header)})  # one key: several are in any order

    def checksum(self) -> str:
        """Return the digest of the content."""
        digest = blake2b(str(self.rounds).encode(), digest_size=16)
        for name, tensor in sorted(self.state.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def restore(self, model: nn.Module, states: States = NO_STATES) -> None:
        """Restore the model, the optimizers and averages, and the sampler.

        Raise a UserError if a part is of another model, optimizer or number of clients.
        """
        _load("model", model, {name: value for name, value in self.state.items() if not name.startswith(STATE_PREFIX)})
        for name, stateful in states.items():
            prefix = f"{STATE_PREFIX}{name}/"
            parts = {entry.removeprefix(prefix): part for entry, part in self.state.items() if entry.startswith(prefix)}
            _load(name, stateful, parts)


def _load(name: str, stateful: Stateful | nn.Module, state: Mapping[str, Any]) -> None:
    """Restore a part of a run, or raise a `UserError`."""
    try:
        stateful.load_state_dict(state)
    except (RuntimeError, UserError) as error:
        reason = f"the checkpoint's {name} does not fit this run ({one_line(error)})"
        raise UserError(f"{reason}; choose another output=…") from error


def cpu_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU, each in separate memory: safetensors refuses tied tensors."""
    dense = torch.contiguous_format
    return {name: tensor.detach().cpu().clone(memory_format=dense) for name, tensor in tensors.items()}


def metadata_of(path: Path, key: str) -> dict[str, Any]:
    """Return the metadata of a safetensors file under a key, or raise a KeyError."""
    with safetensors.safe_open(path, framework="pt") as file:
        return dict(from_json((file.metadata() or {})[key]))


def rounds_of(path: Path, key: str = KEY) -> int | None:
    """Return the number of rounds in the header of a checkpoint or model, or None."""
    try:
        return int(metadata_of(path, key)["rounds"])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
        return None


def save_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and keep the previous one; raise a RunError if it cannot be written."""
    write_atomically(directory / CHECKPOINT_FILE, checkpoint.to_bytes(), keep=directory / PREVIOUS_FILE)


def find_checkpoint(directory: Path, rounds: int) -> tuple[Path, Checkpoint] | None:
    """Return the newest usable checkpoint of at most `rounds`, which have metrics; log why newer ones are not used."""
    for path in (directory / CHECKPOINT_FILE, directory / PREVIOUS_FILE):
        if not path.exists():
            continue
        try:
            checkpoint = Checkpoint.read(path)
        except DamagedError as error:
            log.warning("%s cannot be used: %s", path, error)
            continue
        if checkpoint.rounds <= rounds:
            return path, checkpoint
        log.info("%s is of round %d, but there are metrics of %d only", path, checkpoint.rounds, rounds)
    return None
