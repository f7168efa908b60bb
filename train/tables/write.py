"""Tables and figures as files: Markdown, CSV and PNG, with the published value beside each of ours."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Self

from train.plots import save
from train.tables.cells import Cell
from train.tables.layout import Figure, Layout, Matrix, Panel, Setting
from train.tables.plots import draw_curves, draw_table
from train.tables.results import Grid, Outcome, entry, read_outcome, remarks_on, summarize

TABLE_CURVES = [Panel(y="test_accuracy"), Panel(y="test_accuracy", x="bytes")]
CSV_COLUMNS = (
    *("experiment", "keep_ratio", "variant", "strategy", "seed", "rounds_run", "rounds", "test_accuracy", "seconds"),
    *("lost", "megabytes", "published_mean", "published_sd"),
)


@dataclass(frozen=True)
class Report:
    """What is written, and where.

    Attributes:
        name: stem of the files, ``table1`` or ``figure3``.
        matrix: the table or figure.
        grid: what has been run of it.
        layout: that it stands in, with the published values.
        scale: of the runs.
        command: the one that makes it, to stand beside the numbers.
        into: the folder.
    """

    name: str
    matrix: Matrix
    grid: Grid
    layout: Layout
    scale: str
    command: str
    into: Path

    @classmethod
    def of(
        cls, name: str, matrix: Matrix, cells: Iterable[Cell], layout: Layout, scale: str, command: str, into: Path
    ) -> Self:
        """Read what has been run of these cells."""
        grid: dict[tuple[Setting, str], list[Outcome]] = {}
        for cell in cells:
            grid.setdefault((cell.setting, cell.strategy), []).append(read_outcome(cell))
        return cls(name if isinstance(matrix, Figure) else f"table{name}", matrix, grid, layout, scale, command, into)

    def write(self) -> list[Path]:
        """Write Markdown, CSV and plots, and return their paths."""
        self.into.mkdir(parents=True, exist_ok=True)
        text, cells, dots, curves = (self.into / f"{self.name}{end}" for end in (".md", ".csv", ".png", "_curves.png"))
        self._write_csv(cells)
        pictures = [curves]
        if isinstance(self.matrix, Figure):
            save(draw_curves(self.matrix, self.grid, self.layout, self.matrix.panels), curves)
        else:
            save(draw_curves(self.matrix, self.grid, self.layout, TABLE_CURVES), curves)
            save(draw_table(self.matrix, self.grid, self.layout), dots)
            pictures.insert(0, dots)
        text.write_text("\n".join(self._markdown(pictures)) + "\n", encoding="utf-8")
        return [text, cells, *pictures]

    def _markdown(self, pictures: Iterable[Path]) -> Iterator[str]:
        number = self.name.removeprefix("table").removeprefix("figure")
        kind = "Figure" if isinstance(self.matrix, Figure) else "Table"
        scale = self.layout.scales[self.scale].title
        yield f"# {kind} {number}: {self.matrix.title}" if number.isdigit() else f"# {self.matrix.title}"
        yield ""
        yield f"Test accuracy in % after the last round, mean ± standard deviation over seeds ({scale})."
        yield "`published`: the paper's, at its own scale. A dash: a run that has not finished, or no such value."
        yield "`lost`: trainings of clients that diverged or failed and were left out of their round."
        parts = {name: list(its) for name, its in groupby(self.matrix.settings(), key=lambda its: its.experiment)}
        begun = {name: columns for name, columns in parts.items() if self._has_begun(columns)} or parts
        for experiment, columns in begun.items():
            yield from ("", f"## {self.layout.experiments[experiment].title}", "")
            cells = (self.grid[setting, name] for setting in columns for name in self.matrix.strategies)
            if remarks := remarks_on(chain.from_iterable(cells)):
                yield from (f"Ours on data that are not the official ones: {', '.join(remarks)}.", "")
            yield from self._rows(columns)
        if len(begun) < len(parts):
            rest = ", ".join(self.layout.experiments[name].title for name in parts if name not in begun)
            yield from ("", f"Not begun, and left out here: {rest}.")
        yield from ("", *self._runs(), "", f"Made by `{self.command}`.")
        for picture in pictures:
            yield from ("", f"![{picture.stem}]({picture.name})")

    def _has_begun(self, settings: Iterable[Setting]) -> bool:
        """Return whether a round of any run is there."""
        outcomes = chain.from_iterable(
            self.grid[setting, name] for setting in settings for name in self.matrix.strategies
        )
        return any(outcome.rounds for outcome in outcomes)

    def _rows(self, settings: Sequence[Setting]) -> Iterator[str]:
        """Two columns a setting: ours, and what was published."""
        yield "| strategy |" + "".join(f" {setting.label} | published |" for setting in settings)
        yield "|---|" + "---:|---:|" * len(settings)
        for strategy in self.matrix.strategies:
            entries = (
                f" {summarize(self.grid[setting, strategy])} | {published(self.layout, setting, strategy)} |"
                for setting in settings
            )
            yield f"| {strategy} |" + "".join(entries)

    def _runs(self) -> Iterator[str]:
        """How much was run, and how far the unfinished runs are."""
        outcomes = list({outcome.cell.name: outcome for seeds in self.grid.values() for outcome in seeds}.values())
        finished = [outcome for outcome in outcomes if outcome.finished]
        seconds = [outcome.seconds for outcome in finished]
        spent = f", {min(seconds):.0f} to {max(seconds):.0f} s of rounds each" if seconds else ""
        yield f"{len(finished)} of {len(outcomes)} runs are finished{spent}."
        for outcome in outcomes:
            if outcome.rounds and not outcome.finished:
                yield (
                    f"`{outcome.cell.name}` is at round {outcome.rounds} of {outcome.cell.config.rounds}"
                    f" ({entry(outcome.accuracy, None, digits=1)} %)."
                )

    def _write_csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(CSV_COLUMNS)
            for (setting, strategy), outcomes in self.grid.items():
                known = [*(self.layout.published_of(setting, strategy) or ()), "", ""][:2]
                where = (setting.experiment, setting.keep_ratio, setting.variant, strategy)
                for outcome in filter(lambda outcome: outcome.rounds, outcomes):
                    writer.writerow((*where, *_measured(outcome), *known))


def published(layout: Layout, setting: Setting, strategy: str) -> str:
    """Return the published value as text, a dash where none is known."""
    known = layout.published_of(setting, strategy)
    return "–" if known is None else entry(known[0], known[1] if len(known) > 1 else None, digits=2)


def _measured(outcome: Outcome) -> tuple[object, ...]:
    accuracy = "" if outcome.accuracy is None else f"{outcome.accuracy:.2f}"
    rounds = (outcome.rounds, outcome.cell.config.rounds)
    return (
        outcome.cell.seed,
        *rounds,
        accuracy,
        f"{outcome.seconds:.1f}",
        outcome.lost,
        f"{outcome.megabytes[-1]:.3f}",
    )
