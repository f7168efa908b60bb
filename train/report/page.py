"""Write one page about any runs: their results, costs and settings. It needs no network."""

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sharding.errors import UserError
from train.report.figures import (
    Drawing,
    accuracy_drawings,
    curve_drawings,
    grid_drawing,
    layer_drawings,
    legend_drawing,
    partition_drawings,
)
from train.report.frame import cost_to, find_runs
from train.report.groups import RunGroup, choose_targets, differing_keys, group_runs, value_of, without_repeats
from train.report.plots import svg_of
from train.report.summary import CSV_COLUMNS, SECRET, csv_frame, least_and_most
from train.report.text import NOTHING, mean_and_spread, write_csv
from train.rundir.provenance import Provenance, data_remarks
from train.rundir.records import LayerStatistics, read_clients, read_layers
from train.utils.files import refuse_irregular, write_atomically

PAGE, TABLE, TEMPLATE = "report.html", "report.csv", "page.html"
GENERATOR = "spectral-sharding report"  # marks a page as ours
PHASES = ("plan", "train", "aggregate", "evaluate")
MAX_REASONS = 12  # listed for lost updates

Record = TypeVar("Record")


def write_page(folders: Sequence[Path], into: Path, command: str, targets: Sequence[float] = ()) -> list[Path]:
    """Write `report.html` about all runs in these folders, and `report.csv` with a row for each; return the paths.

    The page shows a command, and the bytes to test accuracies, by default `choose_targets` of each experiment. Raise a
    UserError if there is no run, or a file of that name by another program.
    """
    all_runs, errors = find_runs(folders)
    runs, repeats = without_repeats(all_runs)
    page, table = into / PAGE, into / TABLE
    for path, marker in ((page, GENERATOR), (table, ",".join(CSV_COLUMNS))):
        refuse_irregular(path)
        if path.exists() and marker not in path.read_text(encoding="utf-8", errors="replace")[:500]:
            raise UserError(f"{path} was not written by this program; choose another --output")
    into.mkdir(parents=True, exist_ok=True)
    chapters = []
    for name, directories in runs.settings.groupby("name", sort=False).groups.items():
        groups = group_runs(runs.subset(directories))
        chapters.append(Chapter(str(name), groups, list(targets) or choose_targets(groups), data_remarks(directories)))
    write_csv(table, _csv_with_targets(chapters))
    notes = [f"{error}; it is left out." for error in errors]
    notes += [f"{damaged}; only the rounds before it are shown." for damaged in runs.results.damaged.dropna()]
    notes += [f"{run} is left out: {kept} has the same settings and seed." for run, kept in repeats]
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"spread": mean_and_spread, "span": least_and_most}
    environment.filters["svg"] = lambda drawing: b64encode(svg_of(drawing.figure)).decode()
    environment.filters["percent"] = lambda target: f"{100 * target:g} %"
    for function in (value_of, cost_to, differing_keys, phases_of):
        environment.globals[function.__name__] = function
    title = ", ".join(chapter.name for chapter in chapters)
    words = {"generator": GENERATOR, "title": title, "notes": notes, "command": command, "secret": SECRET}
    text = environment.get_template(TEMPLATE).render(words, table_file=TABLE, chapters=chapters)
    write_atomically(page, text.encode())
    return [page, table]


@dataclass(frozen=True)
class Chapter:
    """The section of one experiment.

    Attributes:
        targets: target accuracies.
        remarks: the ways in which the data differ from the official ones.
        notes: files that could not be read; filled while the section is built.
    """

    name: str
    groups: Sequence[RunGroup]
    targets: Sequence[float]
    remarks: Sequence[str]
    notes: list[str] = field(default_factory=list)

    @property
    def results(self) -> pd.DataFrame:
        """A row for each run, group by group, as in `Runs`."""
        return pd.concat([group.results for group in self.groups])

    def accuracy(self) -> list[Drawing]:
        """Draw the legend of all pictures, the accuracy, the clients' loss, the privacy spent, and the grid."""
        caption = "The clients' mean loss in each round, on their own data."
        loss = curve_drawings(self.groups, "train_loss", "Training loss", caption)
        spent = "ε of (ε, δ)-differential privacy of one client at the configured δ, of all rounds that may be run."
        privacy = curve_drawings(self.groups, "epsilon", "Privacy", spent)
        grid = grid_drawing(self.groups)
        drawings = [legend_drawing(self.groups), *accuracy_drawings(self.groups, self.targets), *loss, *privacy]
        return drawings if grid is None else [*drawings, grid]

    def draws(self) -> list[Drawing]:
        """Draw the quality of the strategies' draws, round by round."""
        of = "Share of the singular terms that at least one client holds."
        squared = "Squared error of the clients' average reconstruction, of ‖W‖²."
        even = "Average normalized marginal entropy of π: 1 where all terms are equally likely."
        return [
            *curve_drawings(self.groups, "coverage", "Coverage", of),
            *curve_drawings(self.groups, "discrepancy", "Discrepancy", squared, log=True),
            *curve_drawings(self.groups, "anme", "Evenness", even),
        ]

    def layers(self) -> "LayerTable | None":
        """Return the last layer record of each group's first seed, or None."""
        read = {group.label: self._read(read_layers, group.results.index[0]) for group in self.groups}
        records = {label: layers for label, layers in read.items() if layers}
        if not records:
            return None
        last = {label: max(layers) for label, layers in records.items()}
        layers_of = {label: records[label][round] for label, round in last.items()}
        names = dict.fromkeys(name for layers in layers_of.values() for name in layers)
        return LayerTable(
            ["layer", *(f"{label} (round {round + 1})" for label, round in last.items())],
            [[name, *(_evenness(layers.get(name, ())) for layers in layers_of.values())] for name in names],
            list(layer_drawings(layers_of, self.groups)),
        )

    def clients(self) -> tuple[list[Drawing], str] | None:
        """Draw the clients' data of the first run with readable clients, or return None."""
        for run in self.results.index:
            if clients := self._read(read_clients, run):
                return [drawing for name, each in clients.items() for drawing in partition_drawings(each, name)], run
        return None

    def reasons(self) -> list[tuple[tuple[str, str], int]]:
        """Return the most frequent reasons for lost updates, by the group's label."""
        failures = ((group.label, each) for group in self.groups for each in group.rounds.failures.dropna())
        reasons = ((label, str(reason)) for label, each in failures for reason in each.values())
        return Counter(reasons).most_common(MAX_REASONS)

    def versions(self) -> tuple[list[str], list[tuple[str, dict[str, str]]]]:
        """Return a header, and the versions of each run over all its starts."""
        starts = [(run, _describe(read)) for run in self.results.index if (read := self._read(Provenance.read, run))]
        return list(dict.fromkeys(key for _, words in starts for key in words)), starts

    def _read(self, reader: Callable[[Path], Record], run: str) -> Record | None:
        """Return the content of a run's file; None if it cannot be read, which is noted."""
        try:
            return reader(Path(run))
        except UserError as error:
            self.notes.append(f"{error}.")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self.notes.append(f"{run} has a file that cannot be read: {type(error).__name__}: {error}.")
        return None


@dataclass(frozen=True)
class LayerTable:
    """The layers of each group as of its last record: a table of their evenness, and π and ω."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    drawings: Sequence[Drawing]


def phases_of(group: RunGroup) -> dict[str, float]:
    """Return the mean seconds of each phase of a round, and of the remaining time."""
    columns = [f"seconds_{phase}" for phase in PHASES]
    means = group.rounds.reindex(columns=columns).fillna(0.0).mean()
    rest = max(0.0, group.rounds.seconds.mean() - means.sum())
    return {**dict(zip(PHASES, means, strict=True)), "rest": rest}


def _evenness(records: Sequence[LayerStatistics]) -> str:
    """Return the mean evenness of a layer over keep ratios, a dash if all terms are certain."""
    values = [record.anme for record in records if not isnan(record.anme)]
    return mean_and_spread([fmean(values)], ".3f") if values else NOTHING


def _describe(provenance: Provenance) -> dict[str, str]:
    words = {"engine": provenance.engine, "device": provenance.device, "threads": str(provenance.threads)}
    starts = [{**start, "commit": _short(start.get("commit"))} for start in provenance.starts]
    for key in dict.fromkeys(key for start in starts for key in start):
        words[key] = ", ".join(dict.fromkeys(str(start.get(key, NOTHING)) for start in starts))
    return words


def _short(commit: object) -> str:
    """Return the first letters of a commit, with ``-dirty`` if it has that end."""
    name, dash, end = str(commit or NOTHING).partition("-")
    return name[:9] + dash + end


def _csv_with_targets(chapters: Sequence[Chapter]) -> pd.DataFrame:
    """Return `csv_frame` of all chapters, with the MB until each of their targets."""
    frame = pd.concat([csv_frame(chapter.groups) for chapter in chapters])[list(CSV_COLUMNS)]
    rounds = pd.concat([group.rounds for chapter in chapters for group in chapter.groups])
    for target in sorted({target for chapter in chapters for target in chapter.targets}):
        frame[f"megabytes_to_{100 * target:g}"] = frame.directory.map(cost_to(rounds, target) / 1e6)
    return frame
