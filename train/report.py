"""What one looks at after training: a table, a Markdown file, and a plot, all made from `metrics.jsonl` alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.table import Table

from train.run import CONFIG_FILE, METRICS_FILE

COLUMNS = ("strategy", "test accuracy", "down / client·round", "up / client·round", "of dense FedAvg's bytes")


@dataclass(frozen=True)
class History:
    """One finished run: its strategy and the lines of its `metrics.jsonl`."""

    strategy: str
    lines: list[dict[str, float]]

    @classmethod
    def read(cls, directory: Path) -> "History":
        """Read a run's directory."""
        config = yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        with (directory / METRICS_FILE).open(encoding="utf-8") as file:
            return cls(config["strategy"], [json.loads(line) for line in file])

    def mean_bytes(self, direction: str) -> float:
        """Bytes ``down`` or ``up``, per client and round."""
        return sum(line[f"bytes_{direction}"] for line in self.lines) / sum(line["clients"] for line in self.lines)

    def curve(self) -> tuple[list[float], list[float]]:
        """(megabytes that all clients have moved so far, test accuracy in %), one point per evaluation."""
        points = evaluations(self.lines, megabytes)
        return [moved for moved, _ in points], [100 * accuracy for _, accuracy in points]


def megabytes(line: Mapping[str, float]) -> float:
    """Return what all clients moved in a round, down and up, in MB, from its line in `metrics.jsonl`."""
    return (line["bytes_down"] + line["bytes_up"]) / 1e6


def evaluations(
    lines: Sequence[Mapping[str, float]], amount: Callable[[Mapping[str, float]], float]
) -> list[tuple[float, float]]:
    """Return (what has been spent so far, test accuracy in 0…1) at every evaluation; a round spends `amount` of it."""
    spent = accumulate(map(amount, lines))
    return [
        (so_far, line["test_accuracy"]) for so_far, line in zip(spent, lines, strict=True) if "test_accuracy" in line
    ]


@dataclass(frozen=True)
class Row:
    """One line of the table: a strategy over its seeds."""

    strategy: str
    accuracies: list[float]
    down: float
    up: float
    share: float

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        spread = f" ± {100 * stdev(self.accuracies):.1f}" if len(self.accuracies) > 1 else ""
        accuracy = f"{100 * mean(self.accuracies):.1f}{spread} %"
        return (
            self.strategy,
            accuracy,
            f"{self.down / 1e3:,.1f} kB",
            f"{self.up / 1e3:,.1f} kB",
            f"{100 * self.share:.1f} %",
        )


def write_report(directories: Sequence[Path], into: Path, title: str, command: str) -> tuple[Table, list[Path]]:
    """Write `summary.md` and `accuracy_vs_bytes.png`; return the table for the screen and the paths written.

    Args:
        directories: of the finished runs.
        into: where to write.
        title: of the table and the plot.
        command: the one that made the runs, to stand beside the numbers.
    """
    histories = [History.read(directory) for directory in directories]
    rows = [
        _row(name, [h for h in histories if h.strategy == name])
        for name in dict.fromkeys(h.strategy for h in histories)
    ]
    summary, plot = into / "summary.md", into / "accuracy_vs_bytes.png"
    summary.write_text(_markdown(title, command, rows, histories, plot.name), encoding="utf-8")
    _plot(histories, title).savefig(plot, dpi=150)
    return _table(title, rows, histories), [*(directory / METRICS_FILE for directory in directories), summary, plot]


def _row(strategy: str, histories: list[History]) -> Row:
    down, up = (mean(history.mean_bytes(direction) for history in histories) for direction in ("down", "up"))
    accuracies = [history.lines[-1]["test_accuracy"] for history in histories]
    return Row(strategy, accuracies, down, up, (down + up) / (2 * histories[0].lines[0]["bytes_dense"]))


def _table(title: str, rows: list[Row], histories: list[History]) -> Table:
    failed = _failures(histories)
    caption = f"{failed} client updates were left out; `failures` in metrics.jsonl says why" if failed else None
    table = Table(title=title, title_justify="left", caption=caption)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row.cells())
    return table


def _failures(histories: list[History]) -> int:
    return int(sum(line["failed"] for history in histories for line in history.lines))


def _markdown(title: str, command: str, rows: list[Row], histories: list[History], plot: str) -> str:
    lines = [f"# {title}", "", f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    seeds = max(len(row.accuracies) for row in rows)
    seconds = sum(line["seconds"] for history in histories for line in history.lines)
    lines += [
        "",
        f"Accuracy after the last of {len(histories[0].lines)} rounds"
        + (f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ", one seed")
        + f"; {seconds:.0f} s of rounds in all; {_failures(histories)} client updates failed or were rejected.",
        "",
        f"Made by `{command}`.",
        "",
        f"![Test accuracy against bytes]({plot})",
    ]
    return "\n".join(lines) + "\n"


def _plot(histories: list[History], title: str) -> Figure:
    """Draw accuracy against bytes moved; one color per strategy, one line per seed."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = mpl.color_sequences["tab10"]
    strategies = list(dict.fromkeys(history.strategy for history in histories))
    for history in histories:
        place = strategies.index(history.strategy)
        first = history is next(other for other in histories if other.strategy == history.strategy)
        axes.plot(
            *history.curve(),
            color="black" if history.strategy == "dense" else colors[place % len(colors)],
            linestyle="--" if history.strategy == "dense" else "-",
            linewidth=1.6,
            label=history.strategy if first else None,
        )
    lay_out_bytes(axes)
    axes.set(
        xlabel="bytes moved by all clients, down and up (MB)",
        ylabel="test accuracy (%)",
        title=title,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def lay_out_bytes(axes: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
