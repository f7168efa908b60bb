"""Versions, commit, device and threads of a run, kept in its directory and checked when it is resumed.

A configuration gives the same bits on the same kind of processor with the same torch. So each start and each
resumption is recorded, and so is the device that `auto` chose.
"""

import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from sharding.errors import UserError
from train.config.schema import Config
from train.experiment.experiment import Experiment
from train.rundir.file_names import PROVENANCE_FILE
from train.utils.jsonl import read_record

log = logging.getLogger(__name__)

PACKAGES = ("torch", "numpy", "safetensors", "spectral-sharding")
ROUNDING = ("torch", "processor")  # what must not change if all rounds of a run are to round alike


@checked(frozen=True)
class Provenance:
    """What a run was made with.

    Attributes:
        engine: the engine as configured.
        threads: the number of threads of each process that trains.
        device: the device on which the run was started.
        data: the ways in which its samples differ from the official ones, by model; of one model, by the run's name.
        starts: a note of each start and resumption: the first round, and versions, commit, processor.
    """

    engine: str
    threads: int
    device: str
    data: Mapping[str, Sequence[str]]
    starts: Annotated[tuple[Mapping[str, Any], ...], Field(min_length=1)]

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the file in a run's directory, None if there is none; raise a UserError if it is damaged."""
        path = directory / PROVENANCE_FILE
        if not path.is_file():
            return None
        return read_record(path, lambda values: cls(**{"data": {}} | values))

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def of(cls, config: Config, experiments: Sequence[Experiment], round: int) -> Self:
        """Describe a run that is about to start."""
        device = str(experiments[0].job.device)
        data = {one.config.name: one.dataset.remarks for one in experiments}
        return cls(config.engine, config.threads, device, data, (describe_start(round),))

    def resumed(self, start: Mapping[str, Any]) -> "Provenance":
        """Return this with one more start. Log a warning if rounds will round differently from now on."""
        for key in ROUNDING:
            previous, current = self.starts[-1].get(key), start[key]
            if previous != current:
                log.warning("this run was started with %s %s; with %s it rounds differently", key, previous, current)
        return replace(self, starts=(*self.starts, start))


def data_remarks(directories: Iterable[Path | str]) -> list[str]:
    """Return how the data of these runs differ from the official ones; a damaged file says nothing."""
    remarks: dict[str, None] = {}
    for directory in directories:
        with suppress(UserError):
            provenance = Provenance.read(Path(directory))
            remarks |= dict.fromkeys(
                remark for each in (provenance.data.values() if provenance else ()) for remark in each
            )
    return list(remarks)


def describe_start(round: int) -> dict[str, Any]:
    """Return versions, commit and processor of a start at this round."""
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return {
        "round": round,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": find_commit(),
        "processor": ", ".join([f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}", *gpu]),
        "system": sys.platform,
    }


def keep_device(config: Config, provenance: Provenance | None) -> Config:
    """Return the configuration with the device that `auto` chose at the first start, if it is available."""
    if provenance is None or config.device != "auto":
        return config
    if provenance.device.startswith("cuda") and not torch.cuda.is_available():
        log.warning(
            "this run was started on %s, which is not available here: it continues on the CPU", provenance.device
        )
        return config
    kind = provenance.device.partition(":")[0]
    return config if kind == "cuda" else config.model_copy(update={"device": kind})


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout, not installed
        return None


@cache  # of the code that this process has imported
def find_commit() -> str | None:
    """Return the checkout's commit, with `-dirty` where files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
