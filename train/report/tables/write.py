"""Write tables and figures as Markdown and PNG, with the published values beside ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure as Picture

from train.report.frame import Runs, mean_curve, read_runs, warn_left_out
from train.report.plots import draw_curves, save, style_of
from train.report.tables.cells import Cell, sends_full_model
from train.report.tables.layout import EXPERIMENTS, SCALES, Setting, Table, published_of
from train.report.text import NOTHING, markdown_table, mean_and_spread
from train.rundir.file_names import METRICS_FILE
from train.rundir.provenance import data_remarks
from train.utils.files import write_atomically


@dataclass(frozen=True)
class TableReport:
    """The content and the place of a table or figure.

    Attributes:
        number: the number of the table, ``1`` or ``longer``, or the figure, ``figure3``.
        table: the table or figure.
        cells: the runs of the table or figure.
        scale: the scale of the runs.
        command: makes it, and is printed beside the numbers.
        into: the folder to write to.
    """

    number: str
    table: Table
    cells: Sequence[Cell]
    scale: str
    command: str
    into: Path

    def write(self) -> list[Path]:
        """Write Markdown and plots, and return their paths."""
        self.into.mkdir(parents=True, exist_ok=True)
        stem = self.number if self.number.startswith("figure") else f"table{self.number}"
        text, curves = (self.into / f"{stem}{end}" for end in (".md", "_curves.png"))
        save(self.draw(self.drawn() or self.table.settings()[:1]), curves)
        paragraphs = [*self._head(), *self._tables(), self._progress(), f"Made by `{self.command}`."]
        paragraphs.append(f"![{curves.stem}]({curves.name})")
        write_atomically(text, ("\n\n".join(paragraphs) + "\n").encode())
        return [text, curves]

    @cached_property
    def runs(self) -> Runs:
        """The runs of these cells that have begun; those that cannot be read are left out with a warning."""
        directories = dict.fromkeys(cell.config.directory for cell in self.cells)
        runs, errors = read_runs(each for each in directories if (each / METRICS_FILE).exists())
        warn_left_out(errors)
        return runs.begun

    @cached_property
    def begun(self) -> pd.DataFrame:
        """A row for each cell with a finished round: its setting, strategy, name, rounds to run, and the run's results.

        A run that serves all keep ratios has a row for each.
        """
        columns = ["setting", "strategy", "name", "rounds", "run"]
        rows = [
            (cell.setting, cell.strategy, cell.name, cell.config.rounds, str(cell.config.directory))
            for cell in self.cells
        ]
        return pd.DataFrame(rows, columns=columns).join(self.runs.results, on="run", how="inner")

    def of_cell(self, setting: Setting, strategy: str) -> pd.DataFrame:
        """Return the finished and unfinished seeds of a cell."""
        return self.begun[(self.begun.strategy == strategy) & (self.begun.setting == setting)]

    def drawn(self) -> list[Setting]:
        """Return the settings with their own runs; without any, those with runs that serve all keep ratios."""
        specific = self.begun[~self.begun.strategy.map(sends_full_model).astype(bool)]
        drawn = set(self.begun.setting if specific.empty else specific.setting)
        return [setting for setting in self.table.settings() if setting in drawn]

    def draw(self, settings: Sequence[Setting]) -> Picture:
        """Draw one row of panels a setting; one color a strategy, its seeds' mean in a band."""
        panels = self.table.panels
        picture = Picture(figsize=(4.6 * len(panels) + 2, 3.0 * len(settings) + 0.2), layout="constrained")
        styles = {strategy: style_of(strategy) for strategy in self.table.strategies}
        handles: dict[str, Artist] = {}
        for row, setting in zip(picture.subplots(len(settings), len(panels), squeeze=False), settings, strict=True):
            rounds = {name: self.runs.subset(self.of_cell(setting, name).run).rounds for name in styles}
            for axes, (x, y) in zip(row, panels, strict=True):
                curves = {name: mean_curve(each, y, x) for name, each in rounds.items()}
                draw_curves(axes, curves, styles, x, y)
                handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            title = f"{EXPERIMENTS[setting.experiment].title}\n{setting.label}"
            row[0].set_title(title, fontsize=9, loc="left")
        picture.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
        return picture

    def _head(self) -> Iterator[str]:
        number = self.number.removeprefix("figure")
        kind = "Table" if number == self.number else "Figure"
        yield f"# {kind} {number}: {self.table.title}" if number.isdigit() else f"# {self.table.title}"
        scale = SCALES[self.scale].title
        yield (
            f"Test accuracy in % after the last round, mean ± standard deviation over seeds ({scale}).\n"
            "`published`: the paper's, at its own scale. A dash: a run that has not finished, or no such value.\n"
            "`lost`: trainings of clients that diverged or failed and were left out of their round."
        )

    def _tables(self) -> Iterator[str]:
        """Yield one table per experiment that has begun, and the names of the others."""
        experiments = groupby(self.table.settings(), key=lambda setting: setting.experiment)
        settings_of = {name: list(settings) for name, settings in experiments}
        begun = self.begun.assign(experiment=[setting.experiment for setting in self.begun.setting])
        directories = begun.groupby("experiment").run.unique().to_dict()
        for experiment, settings in settings_of.items():
            if experiment in directories or not directories:
                yield f"## {EXPERIMENTS[experiment].title}"
                if remarks := data_remarks(directories.get(experiment, ())):
                    yield f"Ours on data that are not the official ones: {', '.join(remarks)}."
                yield self._table(settings)
        if directories and (rest := [name for name in settings_of if name not in directories]):
            yield f"Not begun, and left out here: {', '.join(EXPERIMENTS[name].title for name in rest)}."

    def _table(self, settings: Sequence[Setting]) -> str:
        """Return two columns per setting: ours, and the published values."""
        header = ["strategy", *(head for setting in settings for head in (setting.label, "published"))]
        rows = []
        for strategy in self.table.strategies:
            pairs = ((entry(self.of_cell(each, strategy)), published_of(each, strategy)) for each in settings)
            rows.append([strategy, *(text or NOTHING for pair in pairs for text in pair)])
        return markdown_table(header, rows)

    def _progress(self) -> str:
        """Return how many runs finished, and the progress of the others."""
        runs = self.begun.drop_duplicates("name")
        seconds = runs.seconds[runs.is_finished]  # without numbers where runs have privacy
        spent = f", {seconds.min():.0f} to {seconds.max():.0f} s of rounds each" if seconds.notna().any() else ""
        lines = [f"{len(seconds)} of {len({cell.name for cell in self.cells})} runs are finished{spent}."]
        for run in runs[~runs.is_finished].itertuples():
            score = mean_and_spread(100 * runs.test_accuracy.loc[[run.Index]].dropna())
            lines.append(f"`{run.name}` is at round {run.num_rounds} of {run.rounds} ({score} %).")
        return "\n".join(lines)


def entry(runs: pd.DataFrame) -> str:
    """Return the mean accuracy of the runs that have finished, and how many updates they lost."""
    finished = runs[runs.is_finished & runs.test_accuracy.notna()]
    num_failed = finished.num_failed.sum()
    return mean_and_spread(100 * finished.test_accuracy) + (f" ({num_failed:.0f} lost)" if num_failed else "")
