"""Write one page about any runs: their results, costs and settings. It needs no network."""

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sharding.errors import UserError
from train.report.arms import Arm, choose_targets, differing_keys, group, prices, spent_until, value_of, without_repeats
from train.report.figures import (
    Drawing,
    accuracy_drawings,
    curve_drawings,
    grid_drawing,
    law_drawings,
    legend_drawing,
    partition_drawings,
)
from train.report.history import History, data_remarks, find_runs
from train.report.plots import svg_of
from train.report.summary import CSV_COLUMNS, csv_rows, least_and_most
from train.report.text import NOTHING, mean_and_spread, write_csv
from train.rundir.provenance import Provenance
from train.rundir.records import LayerLaw, Layers, read_clients, read_layers
from train.runtime.files import refuse_irregular, write_whole

PAGE, TABLE, TEMPLATE = "report.html", "report.csv", "page.html"
GENERATOR = "spectral-sharding report"  # marks a page as ours
PHASES = ("plan", "train", "aggregate", "evaluate")
REASONS = 12  # number of listed reasons for lost updates

Found = TypeVar("Found")


def write_page(folders: Sequence[Path], into: Path, command: str, targets: Sequence[float] = ()) -> list[Path]:
    """Write `report.html` about all runs in these folders, and `report.csv` with a row for each run.

    Args:
        folders: that hold runs, or are runs.
        into: the folder to write to.
        command: to show on the page.
        targets: accuracies in % whose bytes are shown; by default `choose_targets` of each experiment.

    Returns:
        The paths written.

    Raises:
        UserError: there is no run, or a file of that name by another program.
    """
    found, unread = find_runs(folders)
    runs, repeats = without_repeats(found)
    page, table = into / PAGE, into / TABLE
    for path, sign in ((page, GENERATOR), (table, ",".join(CSV_COLUMNS))):
        refuse_irregular(path)
        if path.exists() and sign not in path.read_text(encoding="utf-8", errors="replace")[:500]:
            raise UserError(f"{path} was not written by this program; choose another --output")
    into.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(run.name for run in runs)
    chapters = []
    for name in names:
        arms = group([run for run in runs if run.name == name])
        remarks = data_remarks(run for arm in arms for run in arm.runs)
        chapters.append(Chapter(name, arms, list(targets) or choose_targets(arms), remarks))
    _write_table(table, chapters)
    notes = [f"{why}; it is left out." for why in unread]
    notes += [f"{run.spoiled}; only the rounds before it are shown." for run in runs if run.spoiled]
    notes += [f"{run.directory} is left out: {kept.directory} has the same settings and seed." for run, kept in repeats]
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"spread": mean_and_spread, "mean": fmean, "span": least_and_most}
    environment.filters["svg"] = lambda drawing: b64encode(svg_of(drawing.figure)).decode()
    environment.filters["percent"] = lambda aim: f"{aim:g} %"
    for function in (value_of, prices, differing_keys, phases_of):
        environment.globals[function.__name__] = function
    words = {"generator": GENERATOR, "title": ", ".join(names), "notes": notes, "command": command}
    text = environment.get_template(TEMPLATE).render(words, table_file=TABLE, chapters=chapters)
    write_whole(page, text.encode())
    return [page, table]


@dataclass(frozen=True)
class Chapter:
    """The section of one experiment.

    Attributes:
        aims: target accuracies in %.
        remarks: how the data differ from the official ones.
        notes: files that could not be read; filled while the section is built.
    """

    name: str
    arms: Sequence[Arm]
    aims: Sequence[float]
    remarks: Sequence[str]
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[History]:
        """All runs, arm by arm."""
        return [run for arm in self.arms for run in arm.runs]

    def accuracy(self) -> list[Drawing]:
        """Draw the legend of all pictures, the accuracy, the grid and the clients' loss."""
        caption = "The clients' mean loss in each round, on their own data."
        loss = curve_drawings(self.arms, "train_loss", "Training loss", caption)
        grid = grid_drawing(self.arms)
        its = [legend_drawing(self.arms), *accuracy_drawings(self.arms, self.aims), *loss]
        return its if grid is None else [*its, grid]

    def draws(self) -> list[Drawing]:
        """Draw the quality of the strategies' draws, round by round."""
        of = "Share of the singular terms that at least one client holds."
        squared = "Squared error of the clients' average reconstruction, of ‖W‖²."
        even = "Average normalized marginal entropy of π: 1 where all terms are equally likely."
        return [
            *curve_drawings(self.arms, "coverage", "Coverage", of),
            *curve_drawings(self.arms, "discrepancy", "Discrepancy", squared, log=True),
            *curve_drawings(self.arms, "anme", "Evenness", even),
        ]

    def laws(self) -> "Laws | None":
        """Return the last layer record of each arm's first seed, or None."""
        held = {arm.label: laws for arm in self.arms if (laws := self._read(read_layers, arm.runs[0]))}
        if not held:
            return None
        last = {label: max(laws)[0] for label, laws in held.items()}
        shown = {label: _layers_of(held[label], round) for label, round in last.items()}
        names = dict.fromkeys(name for layers in shown.values() for name in layers)
        return Laws(
            ["layer", *(f"{label} (round {round + 1})" for label, round in last.items())],
            [[name, *(_evenness(layers.get(name, ())) for layers in shown.values())] for name in names],
            list(law_drawings(shown, self.arms)),
        )

    def clients(self) -> "tuple[list[Drawing], Path] | None":
        """Draw the clients' data of the first run with readable clients, or return None."""
        for run in self.runs:
            if clients := self._read(read_clients, run):
                drawings = [drawing for name, its in clients.items() for drawing in partition_drawings(its, name)]
                return drawings, run.directory
        return None

    def reasons(self) -> list[tuple[tuple[str, str], int]]:
        """Return the most frequent reasons for lost updates, by the arm's label."""
        each = ((arm.label, line.get("failures", {})) for arm in self.arms for line in arm.lines)
        return Counter((label, str(why)) for label, whys in each for why in whys.values()).most_common(REASONS)

    def versions(self) -> tuple[list[str], list[tuple[History, dict[str, str]]]]:
        """Return a header, and the versions of each run over all its starts."""
        made = [(run, _describe(held)) for run in self.runs if (held := self._read(Provenance.read, run))]
        return list(dict.fromkeys(key for _, its in made for key in its)), made

    def _read(self, reader: Callable[[Path], Found], run: History) -> Found | None:
        """Return the content of a run's file; None if it cannot be read, which is noted."""
        try:
            return reader(run.directory)
        except UserError as error:
            self.notes.append(f"{error}.")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self.notes.append(f"{run.directory} has a file that cannot be read: {type(error).__name__}: {error}.")
        return None


@dataclass(frozen=True)
class Laws:
    """The layers of each arm as of its last record: a table of their evenness, and π and ω."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    drawings: Sequence[Drawing]


def phases_of(arm: Arm) -> dict[str, float]:
    """Return the mean seconds of each phase of a round, and of the remaining time."""
    named = {phase: fmean(line.get(f"seconds_{phase}", 0.0) for line in arm.lines) for phase in PHASES}
    return named | {"rest": max(0.0, fmean(line["seconds"] for line in arm.lines) - sum(named.values()))}


def _evenness(laws: Sequence[LayerLaw]) -> str:
    """Return the mean evenness of a layer over keep ratios, a dash if all terms are certain."""
    values = [law.anme for law in laws if not isnan(law.anme)]
    return mean_and_spread([fmean(values)], ".3f") if values else NOTHING


def _layers_of(laws: Mapping[tuple[int, str], Layers], round: int) -> Layers:
    """Return the layers of a round; with several tasks, their names include the task."""
    tasks = {task: layers for (when, task), layers in laws.items() if when == round}
    if len(tasks) == 1:
        return next(iter(tasks.values()))
    return {f"{task}/{name}": its for task, layers in tasks.items() for name, its in layers.items()}


def _describe(held: Provenance) -> dict[str, str]:
    words = {"engine": held.engine, "device": held.device, "threads": str(held.threads)}
    starts = [{**start, "commit": _short(start.get("commit"))} for start in held.starts]
    for key in dict.fromkeys(key for start in starts for key in start):
        words[key] = ", ".join(dict.fromkeys(str(start.get(key, NOTHING)) for start in starts))
    return words


def _short(commit: object) -> str:
    """Return the first letters of a commit, with ``-dirty`` if it has that end."""
    name, dash, end = str(commit or NOTHING).partition("-")
    return name[:9] + dash + end


def _write_table(path: Path, chapters: Sequence[Chapter]) -> None:
    aims = sorted({aim for chapter in chapters for aim in chapter.aims})
    rows = []
    for chapter in chapters:
        for row, run in zip(csv_rows(chapter.arms), chapter.runs, strict=True):
            rows.append((*row, *(spent_until(run, aim, "bytes") for aim in aims)))
    write_csv(path, (*CSV_COLUMNS, *(f"megabytes_to_{aim:g}" for aim in aims)), rows)
