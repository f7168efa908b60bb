"""The server's model on disk, so that an interrupted run resumes where it was.

Every random number is keyed by its round and local optimizers are fresh each round, so the model, the number of
finished rounds, what the server's optimizer remembers, the average of the models and what the sampler has learned of
the clients are all the state there is. The last two checkpoints are kept, each with a checksum: should the newer one be
spoiled, or be ahead of the metrics because the process died between the two, the run resumes from the older one, with
the same result.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from sharding.client_sampling import Sampler
from sharding.errors import UserError
from train.rundir.files import CHECKPOINT_FILE, PREVIOUS_FILE
from train.runtime.files import write_whole

log = logging.getLogger(__name__)

FORMAT = 2
KEY = "checkpoint"
BESIDE = "."  # begins the names of what is kept beside the model: no part of a tensor's name is empty


class Keeper(Protocol):
    """What has to be on disk beside the model: a server's optimizer, or an average."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Take them back."""


Keepers = Mapping[str, Keeper]  # by ``<kind>/<model>``
NO_KEEPERS: Keepers = {}


class SpoiledError(Exception):
    """A checkpoint cannot be used; says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A model after some rounds.

    Attributes:
        rounds: that are finished.
        state: of the model, by name, and of what is kept beside it: servers' optimizers, as
            ``.server/<model>/<weight>/<part>``, and averages of models, as ``.average/<model>/module.<tensor>``.
        gradient_norms: what the sampler has learned of the clients, if it learns.
    """

    rounds: int
    state: dict[str, Tensor]
    gradient_norms: list[float] | None = None

    @classmethod
    def of(cls, model: nn.Module, rounds: int, sampler: Sampler | None = None, keepers: Keepers = NO_KEEPERS) -> Self:
        """Return the checkpoint of a model after so many rounds."""
        tensors: dict[str, Tensor] = dict(model.state_dict())
        for place, keeper in keepers.items():
            tensors |= {f"{BESIDE}{place}/{name}": tensor for name, tensor in keeper.state_dict().items()}
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        learned = None if sampler is None else sampler.gradient_norms
        return cls(rounds, state, None if learned is None else learned.tolist())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            SpoiledError: it is no checkpoint, is cut off or altered.
            UserError: it was written by another version.
        """
        try:
            told = metadata_of(path, KEY)
            with safetensors.safe_open(path, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            _refuse_other_format(path, told)
            read = cls(int(told["rounds"]), state, told["gradient_norms"])
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
            raise SpoiledError(f"it is no whole checkpoint ({type(error).__name__}: {error})") from error
        if read.rounds < 0:
            raise SpoiledError(f"it says {read.rounds} rounds")
        if told["checksum"] != read.checksum():
            raise SpoiledError("its content is not what was written: the checksum differs")
        return read

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        told = {
            "format": FORMAT,
            "rounds": self.rounds,
            "gradient_norms": self.gradient_norms,
            "checksum": self.checksum(),
        }
        return safetensors.torch.save(self.state, {KEY: json.dumps(told)})  # one key: several are in any order

    def checksum(self) -> str:
        """Return the digest of all that it holds."""
        digest = blake2b(json.dumps([self.rounds, self.gradient_norms]).encode(), digest_size=16)
        for name, tensor in sorted(self.state.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def must_fit(self, model: nn.Module | None) -> None:
        """Make sure that this is a checkpoint of that model, if one is given.

        Raises:
            SpoiledError: it is not.
        """
        wanted = {} if model is None else {name: tensor.shape for name, tensor in model.state_dict().items()}
        held = {name: tensor.shape for name, tensor in self._model_state().items()}
        differing = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
        if model is not None and differing:
            raise SpoiledError(f"it is of another model: {differing[0]} differs")

    def restore(self, model: nn.Module, sampler: Sampler | None = None, keepers: Keepers = NO_KEEPERS) -> None:
        """Put the model, what is kept beside it and what the sampler had learned where they were."""
        model.load_state_dict(self._model_state())
        for place, keeper in keepers.items():
            start = f"{BESIDE}{place}/"
            its = {name.removeprefix(start): value for name, value in self.state.items() if name.startswith(start)}
            keeper.load_state_dict(its)
        if sampler is not None and self.gradient_norms is not None:
            sampler.restore(np.array(self.gradient_norms))

    def _model_state(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state.items() if not name.startswith(BESIDE)}


def metadata_of(path: Path, key: str) -> dict[str, Any]:
    """Return what a file of tensors says of itself under a key.

    Raises:
        KeyError: it says nothing.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        return dict(json.loads((file.metadata() or {})[key]))


def rounds_of(path: Path, key: str = KEY) -> int | None:
    """Return how many rounds the header of a checkpoint or model names; None where it names none."""
    try:
        return int(metadata_of(path, key)["rounds"])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
        return None


def save_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write the newest checkpoint; the one before is kept.

    Raises:
        RunError: it cannot be written; those that were there still are.
    """
    write_whole(directory / CHECKPOINT_FILE, checkpoint.to_bytes(), keep=directory / PREVIOUS_FILE)


def find_checkpoint(directory: Path, rounds: int, model: nn.Module | None = None) -> tuple[Path, Checkpoint] | None:
    """Return the newest checkpoint that can be used and is not ahead of so many rounds; what is wrong is told.

    Args:
        directory: of the run.
        rounds: of which there are metrics.
        model: that it must fit.

    Raises:
        UserError: one was written by another version.
    """
    for path in (directory / CHECKPOINT_FILE, directory / PREVIOUS_FILE):
        if not path.exists():
            continue
        try:
            checkpoint = Checkpoint.read(path)
            checkpoint.must_fit(model)
        except SpoiledError as error:
            log.warning("%s cannot be used: %s", path, error)
            continue
        if checkpoint.rounds <= rounds:
            return path, checkpoint
        log.info("%s is of round %d, but there are metrics of %d only", path, checkpoint.rounds, rounds)
    return None


def _refuse_other_format(path: Path, told: dict[str, Any]) -> None:
    if told["format"] != FORMAT:
        other = "a later" if told["format"] > FORMAT else "an earlier"
        raise UserError(f"{path} is in format {told['format']}, that of {other} version: choose another output=…")
