"""Write tables and figures as Markdown and PNG, with the published values beside ours."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.figure import Figure as Picture

from train.report.history import History, data_remarks, read_all, warn_of
from train.report.plots import LABELS, draw_curves, save, style_of
from train.report.text import NOTHING, markdown_table, mean_and_spread
from train.rundir.files import METRICS_FILE
from train.runtime.files import write_whole
from train.tables.cells import Cell, is_whole
from train.tables.layout import Figure, Layout, Matrix, Panel, Setting

TABLE_CURVES = [Panel(y="test_accuracy"), Panel(y="test_accuracy", x="bytes")]


@dataclass(frozen=True)
class Report:
    """The content and the place of a table or figure.

    Attributes:
        number: of the table, ``1`` or ``longer``, or the figure, ``figure3``.
        matrix: the table or figure.
        cells: its runs.
        layout: which contains it, with the published values.
        scale: of the runs.
        command: makes it, and is printed beside the numbers.
        into: the folder to write to.
    """

    number: str
    matrix: Matrix
    cells: Sequence[Cell]
    layout: Layout
    scale: str
    command: str
    into: Path

    @cached_property
    def runs(self) -> dict[str, History]:
        """The runs of these cells, by the cell's name; those that cannot be read are left out with a warning."""
        begun = {cell.config.directory: cell.name for cell in self.cells}
        found, unread = read_all(directory for directory in begun if (directory / METRICS_FILE).exists())
        warn_of(unread)
        return {begun[run.directory]: run for run in found if run.lines}

    def write(self) -> list[Path]:
        """Write Markdown and plots, and return their paths."""
        self.into.mkdir(parents=True, exist_ok=True)
        stem = self.number if isinstance(self.matrix, Figure) else f"table{self.number}"
        text, curves = (self.into / f"{stem}{end}" for end in (".md", "_curves.png"))
        settings = self.drawn() or self.matrix.settings()
        panels = TABLE_CURVES
        if isinstance(self.matrix, Figure):
            panels, settings = self.matrix.panels, self.drawn() or settings[:1]
        save(self.draw(settings, panels), curves)
        paragraphs = [*self._head(), *self._tables(), *self._runs(), f"Made by `{self.command}`."]
        paragraphs.append(f"![{curves.stem}]({curves.name})")
        write_whole(text, ("\n\n".join(paragraphs) + "\n").encode())
        return [text, curves]

    @cached_property
    def begun(self) -> dict[tuple[Setting, str], list[History]]:
        """The runs of each setting and strategy that has any."""
        begun: dict[tuple[Setting, str], list[History]] = {}
        for cell in self.cells:
            if cell.name in self.runs:
                begun.setdefault((cell.setting, cell.strategy), []).append(self.runs[cell.name])
        return begun

    def of_cell(self, setting: Setting, strategy: str) -> list[History]:
        """Return the finished and unfinished seeds of a cell."""
        return self.begun.get((setting, strategy), [])

    def drawn(self) -> list[Setting]:
        """Return the settings with their own runs; without any, those with runs that serve all keep ratios."""
        own = {setting for setting, strategy in self.begun if not is_whole(strategy)}
        drawn = own or {setting for setting, _ in self.begun}
        return [setting for setting in self.matrix.settings() if setting in drawn]

    def draw(self, settings: Sequence[Setting], panels: Sequence[Panel]) -> Picture:
        """Draw one row of panels a setting; one color a strategy, its seeds' mean in a band."""
        picture = Picture(figsize=(4.6 * len(panels) + 2, 3.0 * len(settings) + 0.2), layout="constrained")
        styles = {strategy: style_of(strategy) for strategy in self.matrix.strategies}
        handles: dict[str, Artist] = {}
        for row, setting in zip(picture.subplots(len(settings), len(panels), squeeze=False), settings, strict=True):
            for axes, panel in zip(row, panels, strict=True):
                curves = {
                    strategy: [run.curve(panel.y, panel.x, panel.smooth) for run in self.of_cell(setting, strategy)]
                    for strategy in self.matrix.strategies
                }
                draw_curves(axes, curves, styles, panel.x, panel.y)
                if panel.smooth:
                    axes.set_ylabel(f"{LABELS.get(panel.y, panel.y)}\nmoving average {panel.smooth:g}")
                handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            title = self.layout.experiments[setting.experiment].title
            row[0].set_title(f"{title}\n{setting.label}", fontsize=9, loc="left")
        picture.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
        return picture

    def _head(self) -> Iterator[str]:
        number = self.number.removeprefix("figure")
        kind = "Figure" if isinstance(self.matrix, Figure) else "Table"
        yield f"# {kind} {number}: {self.matrix.title}" if number.isdigit() else f"# {self.matrix.title}"
        scale = self.layout.scales[self.scale].title
        yield (
            f"Test accuracy in % after the last round, mean ± standard deviation over seeds ({scale}).\n"
            "`published`: the paper's, at its own scale. A dash: a run that has not finished, or no such value.\n"
            "`lost`: trainings of clients that diverged or failed and were left out of their round."
        )

    def _tables(self) -> Iterator[str]:
        """Yield one table per experiment that has begun, and the names of the others."""
        parts = {name: list(its) for name, its in groupby(self.matrix.settings(), key=lambda its: its.experiment)}
        begun = {setting.experiment for setting, _ in self.begun} or {*parts}
        for experiment, settings in parts.items():
            if experiment in begun:
                yield f"## {self.layout.experiments[experiment].title}"
                runs = (run for its in settings for name in self.matrix.strategies for run in self.of_cell(its, name))
                if remarks := data_remarks(runs):
                    yield f"Ours on data that are not the official ones: {', '.join(remarks)}."
                yield self._table(settings)
        if rest := [self.layout.experiments[name].title for name in parts if name not in begun]:
            yield f"Not begun, and left out here: {', '.join(rest)}."

    def _table(self, settings: Sequence[Setting]) -> str:
        """Return two columns per setting: ours, and the published values."""
        header = ["strategy", *(head for setting in settings for head in (setting.label, "published"))]
        rows = [
            [name, *(text for its in settings for text in (entry(self.of_cell(its, name)), self._published(its, name)))]
            for name in self.matrix.strategies
        ]
        return markdown_table(header, rows)

    def _published(self, setting: Setting, strategy: str) -> str:
        known = self.layout.published_of(setting, strategy)
        return NOTHING if known is None else " ± ".join(f"{value:.2f}" for value in known)

    def _runs(self) -> Iterator[str]:
        """Yield how many runs finished, and the progress of the others."""
        configs = {cell.name: cell.config for cell in self.cells}
        finished = [run for run in self.runs.values() if run.is_finished]
        seconds = [run.total("seconds") for run in finished]
        spent = f", {min(seconds):.0f} to {max(seconds):.0f} s of rounds each" if seconds else ""
        lines = [f"{len(finished)} of {len(configs)} runs are finished{spent}."]
        for name, run in self.runs.items():
            if not run.is_finished:
                score = mean_and_spread(run.accuracies[-1:])
                lines.append(f"`{name}` is at round {len(run.lines)} of {configs[name].rounds} ({score} %).")
        yield "\n".join(lines)


def entry(runs: Iterable[History]) -> str:
    """Return the mean accuracy of the runs that have finished, and how many updates they lost."""
    finished = [run for run in runs if run.is_finished and run.accuracies]
    lost = int(sum(run.total("failed") for run in finished))
    return mean_and_spread([run.accuracies[-1] for run in finished]) + (f" ({lost} lost)" if lost else "")
