"""The server's model on disk, so that a run that was cut off goes on where it was.

Every random number is keyed by its round and local optimizers are fresh each round, so the model and the number of
finished rounds are all the state there is.
"""

import json
from pathlib import Path

import safetensors
import safetensors.torch
from torch import nn

MODEL_FILE = "model.safetensors"


def save_checkpoint(directory: Path, model: nn.Module, rounds: int) -> None:
    """Write the model after `rounds` finished rounds; the old file stays until the new one is complete."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    unfinished = directory / f"{MODEL_FILE}.tmp"
    safetensors.torch.save_file(state, unfinished, metadata={"rounds": str(rounds)})
    unfinished.replace(directory / MODEL_FILE)


def load_checkpoint(directory: Path, model: nn.Module) -> int:
    """Load the model and return the number of finished rounds: 0, and the model untouched, if there is no file."""
    path = directory / MODEL_FILE
    if not path.exists():
        return 0
    model.load_state_dict(safetensors.torch.load_file(path))
    with safetensors.safe_open(path, framework="pt") as file:
        return int(file.metadata()["rounds"])


def drop_rounds_from(metrics: Path, rounds: int) -> None:
    """Drop what `metrics` says of round `rounds` and later: they are about to be run again.

    A last line that was cut off in writing goes as well.
    """
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["round"] >= rounds:
            break
        kept.append(line)
    metrics.write_text("".join(kept), encoding="utf-8")
