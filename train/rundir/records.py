"""Records of a run: its clients (`clients.json`), and the strategy's decisions per layer (`layers.jsonl`).

With privacy, what is known of single clients is a secret, and so is how many of them drew a term.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from math import nan
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from sharding import Plan, UserError
from sharding.rng import generator
from sharding.rounds.diagnostics import anme
from train.config.schema import Config
from train.config.sections import Ratio
from train.data.dataset import digest_of
from train.data.partition import class_counts, client_names
from train.experiment.experiment import Experiment
from train.experiment.metrics import RoundMetrics
from train.rundir.file_names import CLIENTS_FILE, LAYERS_FILE, SECRET_CLIENTS_FILE, WANDB_FILE
from train.utils.files import write_atomically
from train.utils.jsonl import complete_lines, from_json, read_record, valid_objects

DIGITS = 6  # significant ones are enough to draw

Count = Annotated[int, Field(ge=0, lt=2**53)]

ClientRecords = Mapping[str, Mapping[str, object]]  # by the name of a model, or of the run, as from `describe_clients`
Layers = Mapping[str, Sequence["LayerStatistics"]]  # of a round: by layer, one entry per keep ratio


@checked(frozen=True)
class LayerStatistics:
    """A strategy's decision for one layer and keep ratio in one round, and the clients' draws.

    Attributes:
        keep_ratio: r.
        anme: evenness of π; NaN where all terms are certain.
        magnitudes: λ, (N,).
        inclusion: π, (N,).
        multipliers: ω, (N,).
        draws: the number of clients that drew each term, (N,).
    """

    keep_ratio: float
    anme: float
    magnitudes: list[float]
    inclusion: list[float]
    multipliers: list[float]
    draws: list[int]

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self:
        """Parse one entry of `layers.jsonl`."""
        return cls(**dict(entry) | {"anme": nan if entry["anme"] is None else entry["anme"]})

    def to_json(self) -> dict[str, object]:
        """Return the entry of `layers.jsonl`."""
        return self.__dict__ | {"anme": None if np.isnan(self.anme) else self.anme}


@checked(frozen=True)
class _Clients:
    """Schema of one model's clients in the file."""

    samples: list[Count]
    keep_ratios: list[Ratio]
    classes: list[list[Count]] | None
    class_names: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    node_keys: list[str] = field(default_factory=list)
    digest: str | None = None

    def __post_init__(self) -> None:
        """Check that there is one of each for every client."""
        counts = self.samples if self.classes is None else self.classes
        if not len(self.samples) == len(self.keep_ratios) == len(counts):
            raise ValueError("samples, keep_ratios and classes have other lengths")
        if len({len(row) for row in self.classes or ()}) > 1:
            raise ValueError("classes has rows of several lengths")


def layer_statistics(plan: Plan | Mapping[str, Plan]) -> Layers:
    """Return a round's decisions for each layer; with several models, the layers are named ``<model>/<layer>``."""
    if not isinstance(plan, Plan):
        plans = plan.items()
        return {f"{model}/{name}": each for model, one in plans for name, each in layer_statistics(one).items()}
    statistics: dict[str, list[LayerStatistics]] = {name: [] for name in plan.spectra}
    for (ratio, name), draw in plan.draws.items():
        magnitudes, inclusion = draw.context.magnitudes, draw.allocation.inclusion
        num_clients = np.bincount(draw.indices.ravel(), minlength=len(magnitudes))
        values, chances, weights = map(_round_all, (magnitudes, inclusion, draw.allocation.multipliers))
        entry = LayerStatistics(ratio, anme([inclusion]), values, chances, weights, num_clients.tolist())
        statistics[name].append(entry)
    return statistics


def records_layers(config: Config, metrics: RoundMetrics) -> bool:
    """Return whether a round's layers are recorded: those of the first and of the last, and none with privacy."""
    if config.privacy is not None:
        return False
    return metrics.round in (0, config.rounds - 1) or metrics.stopped is not None


def append_layers(path: Path, round: int, layers: Layers) -> None:
    """Append a round's layer records, if there are any."""
    if layers:
        entries = {name: [entry.to_json() for entry in entries] for name, entries in layers.items()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": round, "layers": entries}) + "\n")


def read_layers(directory: Path) -> dict[int, Layers]:
    """Return a run's layer records by round; if a round was run again, its last record.

    Reading ends at a damaged line.
    """
    return {
        int(line["round"]): {
            name: [LayerStatistics.read(entry) for entry in entries] for name, entries in line["layers"].items()
        }
        for line in valid_objects(complete_lines(directory / LAYERS_FILE))
        if line["layers"]
    }


def describe_clients(experiments: Iterable[Experiment]) -> ClientRecords:
    """Return, by the name of each model, what is known of the data and the clients.

    That is each client's number of samples, keep ratio, samples of each class (None for text or remote data) and, where
    there are any, the names of classes and clients; and a digest of all samples on this machine.
    """
    return {one.config.name: _client_record(one) for one in experiments}


def write_clients(config: Config, clients: ClientRecords) -> None:
    """Write the records of a run's clients; with privacy, into a file that only the run's owner can read."""
    path, mode = config.directory / clients_file(config), 0o666 if config.privacy is None else 0o600
    write_atomically(path, json.dumps(clients).encode(), mode=mode)


def clients_file(config: Config) -> str:
    """Return the name of the file of a run's clients."""
    return CLIENTS_FILE if config.privacy is None else SECRET_CLIENTS_FILE


def read_clients(directory: Path, name: str = CLIENTS_FILE) -> dict[str, dict[str, Any]]:
    """Return the records of a run's clients, empty if there are none; raise a UserError if the file is spoiled."""
    path = directory / name
    if not path.is_file():
        return {}
    return read_record(path, lambda models: {name: dict(vars(_Clients(**record))) for name, record in models.items()})


def check_clients(config: Config, clients: ClientRecords) -> None:
    """Raise a UserError if the clients do not have the same samples as when the run was started."""
    directory = config.directory
    for name, stored in read_clients(directory, clients_file(config)).items():
        current = clients.get(name, {})
        if any(stored.get(key) != current.get(key) for key in ("samples", "classes", "digest")):
            difference = f"{directory} was started with other data than the present {name}"
            raise UserError(f"{difference}; set data.root=… to the folder of those data, or choose another output=…")


def wandb_state(directory: Path) -> dict[str, Any]:
    """Return what a run keeps of its run at W&B, its `id`, `rounds` and `where`; nothing if that cannot be read."""
    with suppress(OSError, ValueError):
        if isinstance(state := from_json((directory / WANDB_FILE).read_text(encoding="utf-8")), dict):
            return state
    return {}


def _client_record(experiment: Experiment) -> dict[str, object]:
    clients, training = experiment.clients, experiment.clients.data.all()
    targets, sizes = training.targets, list(clients.num_samples.values())
    classes = None
    if targets.dim() == 1 and len(targets) == sum(sizes):  # not text, and the samples are on this machine
        owned = np.split(np.arange(len(targets)), np.cumsum(sizes)[:-1])
        classes = class_counts(owned, targets.cpu().numpy(), experiment.dataset.num_classes)
    config = experiment.config
    rng = generator(config.seed_of_data, "partition")
    names = client_names(config.data.partition.name, experiment.dataset, config.clients.count, rng)
    return {
        "samples": sizes,
        "keep_ratios": list(clients.keep_ratios.values()),
        "classes": None if classes is None else classes.tolist(),
        **({"class_names": list(experiment.dataset.class_names)} if experiment.dataset.class_names else {}),
        **({"names": names} if names else {}),
        "digest": digest_of(training, experiment.dataset.test),
        **({"node_keys": list(clients.node_keys)} if clients.node_keys else {}),
    }


def _round_all(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
