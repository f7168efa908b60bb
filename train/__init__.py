"""Train with spectral shards: simulated clients or a Flower federation, from a configuration to reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

__all__ = ["load_model"]


def load_model(directory: Path | str, best: bool = False) -> nn.Module:
    """Build the model of a run on the CPU, load its trained weights and set it to evaluation mode.

    It does not need the data. For a run with `plugins`, import those modules first: they are code, and a directory from
    elsewhere has none imported.

    Args:
        directory: the directory of the run, as ``"runs/quickstart-top_n-0"``.
        best: load the weights that had the best evaluation, rather than those of the last round.

    Returns:
        The model, whose `class_names` are the names of its outputs, if they have names; several models are an
        `nn.ModuleDict`.

    Raises:
        UserError: the directory holds no run, its model cannot be read, or its plugins are not imported.
    """
    from train.rundir.model_file import read_model  # noqa: PLC0415  # torch is imported when it is needed

    return read_model(directory, best)
