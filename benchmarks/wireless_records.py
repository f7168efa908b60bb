"""What is kept of Setup 2 of the wireless study: files in the study's folder, from which its tables are made again.

`pilots.json` has the setting, the core's seconds, and what the pilots taught in each candidate world; `runs.csv` has a
row a run, with the simulated seconds to each target; `worlds_*.csv` the same of other worlds; `bands.csv` the picture.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self, get_args

from arrivals import Band
from synthetic import Sizes

from train.files import write_whole
from train.pilots import Lesson

FILE = "pilots.json"


@dataclass(frozen=True)
class Setting:
    """What is run; `quick` is for tests, and shows nothing else."""

    target: float = 0.7
    accuracy: float = 0.78
    levels: tuple[float, ...] = (1.2, 1.15, 1.1, 1.05, 1.0)
    sweep_target: float = 1.2
    runs: int = 20
    candidates: int = 10
    worlds: int = 5
    rounds: int = 3000
    pilot_rounds: int = 600

    @classmethod
    def quick(cls) -> "Setting":
        """Return a setting of seconds."""
        return cls(1.95, 0.3, (2.2, 2.15, 2.1), 2.0, 2, 2, 2, 6, 8)


class Arrival(NamedTuple):
    """When a run reached what.

    Attributes:
        part: of the study: `main`, `beta` (another β/α) or `draws` (another K).
        done: rounds, the last of which reached the loss that the part is run to, or is its limit.
        at: simulated seconds by training loss; None: not reached.
        at_accuracy: the same by test accuracy.
    """

    part: str
    scheme: str
    cohort_size: int
    world: int
    seed: int
    done: int
    at: Mapping[float, float | None]
    at_accuracy: Mapping[float, float | None]

    def rounds_to(self, loss: float) -> int | None:
        """Return the rounds to the loss that the part is run to, None if it was not reached."""
        return None if self.at[loss] is None else self.done

    def seconds_to(self, loss: float | None = None, accuracy: float | None = None) -> float | None:
        """Return the simulated seconds to a training loss or a test accuracy, None if it was not reached."""
        return self.at_accuracy[accuracy] if accuracy is not None else self.at[loss] if loss is not None else None


class Ending(NamedTuple):
    """The seconds of a scheme to the loss at which its world is compared."""

    scheme: str
    world: int
    rounds: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Records:
    """All that is kept.

    Attributes:
        setting: of which this is the outcome.
        core_seconds: that it took.
        lessons: of the pilots of the candidate worlds, 0, 1, ….
        arrivals: of all runs in the world that was chosen.
        worlds: by law of the sizes, how the schemes did in others.
        bands: what the picture shows.
    """

    setting: Setting
    core_seconds: float
    lessons: Sequence[Lesson]
    arrivals: Sequence[Arrival]
    worlds: Mapping[str, Sequence[Ending]]
    bands: Sequence[Band]

    def of(self, part: str, scheme: str, size: int) -> list[Arrival]:
        """Return the runs of a scheme with so many draws, one a seed."""
        wanted = (part, scheme, size)
        return [its for its in self.arrivals if (its.part, its.scheme, its.cohort_size) == wanted]

    def write(self, into: Path) -> None:
        """Write the files."""
        targets, accuracies = (list(column) for column in (self.arrivals[0].at, self.arrivals[0].at_accuracy))
        names = [f"seconds_to_loss_{target:g}" for target in targets] + [f"seconds_to_{a:g}" for a in accuracies]
        rows = [
            (*its[:6], *(_cell(value) for value in (*its.at.values(), *its.at_accuracy.values())))
            for its in self.arrivals
        ]
        _write(into / "runs.csv", [("part", "scheme", "K", "world", "seed", "rounds", *names), *rows])
        for law, endings in self.worlds.items():
            shown = [(*its[:3], f"{its.loss:.4f}", _cell(its.seconds)) for its in endings]
            _write(into / f"worlds_{law}.csv", [("scheme", "world", "rounds", "loss", "seconds_to_loss"), *shown])
        points = [(*band[:2], *(f"{value:.6g}" for value in band[2:])) for band in self.bands]
        _write(into / "bands.csv", [Band._fields, *points])
        kept = {
            "setting": asdict(self.setting),
            "core_seconds": round(self.core_seconds),
            "lessons": [asdict(lesson) for lesson in self.lessons],
        }
        write_whole(into / FILE, (json.dumps(kept) + "\n").encode())  # last: where it is, all is

    @classmethod
    def read(cls, into: Path, setting: Setting) -> Self | None:
        """Return what is kept of this setting, None if nothing is."""
        if not (into / FILE).exists():
            return None
        kept = json.loads((into / FILE).read_bytes())
        if kept["setting"] != json.loads(json.dumps(asdict(setting))):
            return None
        worlds = {
            law: [
                Ending(scheme, int(world), int(rounds), float(loss), float(seconds))
                for scheme, world, rounds, loss, seconds in list(_read(into / f"worlds_{law}.csv"))[1:]
            ]
            for law in get_args(Sizes)
        }
        rows = list(_read(into / "bands.csv"))[1:]
        bands = [Band(scheme, what, *map(float, numbers)) for scheme, what, *numbers in rows]
        lessons = [Lesson(**its) for its in kept["lessons"]]
        return cls(setting, kept["core_seconds"], lessons, _arrivals(into / "runs.csv"), worlds, bands)


def _arrivals(path: Path) -> list[Arrival]:
    head, *rows = _read(path)
    targets = [float(name.removeprefix("seconds_to_loss_")) for name in head if name.startswith("seconds_to_loss_")]
    accuracies = [float(name.removeprefix("seconds_to_")) for name in head[6 + len(targets) :]]
    found = []
    for part, scheme, *numbers in rows:
        size, world, seed, done = map(int, numbers[:4])
        spent = [float(cell) if cell else None for cell in numbers[4:]]
        at = dict(zip(targets, spent, strict=False)), dict(zip(accuracies, spent[len(targets) :], strict=True))
        found.append(Arrival(part, scheme, size, world, seed, done, *at))
    return found


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _write(path: Path, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _read(path: Path) -> Iterator[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.reader(file)
