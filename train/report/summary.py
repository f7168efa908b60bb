"""What is written after training, of a run or of several: a table, a Markdown file, a CSV, and a plot."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.table import Table

from train.directory import METRICS_FILE
from train.files import write_whole
from train.plots import accuracy_figure, save
from train.report.history import Arm, History, group, megabytes, read_all, without_repeats, write_csv
from train.report.targets import mean_and_spread, price, reached_targets, targets_of

COLUMNS = ("strategy", "test accuracy", "down / client·round", "up / client·round", "of dense FedAvg's bytes")
CSV_COLUMNS = (
    *("strategy", "settings", "seed", "directory", "rounds", "test_accuracy", "best_accuracy", "test_loss"),
    *("megabytes", "bytes_down_per_client_round", "bytes_up_per_client_round", "share_of_dense", "failed"),
    *("seconds", "simulated_seconds"),
)
SUMMARY, TABLE, PLOT = "summary.md", "summary.csv", "accuracy_vs_bytes.png"
RESUME = " --resume"


@dataclass(frozen=True)
class Row:
    """One line of the table: a strategy, with its settings, over its seeds; accuracies in %."""

    label: str
    accuracies: list[float]
    down: float
    up: float
    share: float
    price: str | None

    @classmethod
    def of(cls, arm: Arm, target: float | None) -> "Row":
        """Average the runs of an arm; its price is what it moved to reach the target in %."""
        down, up = (mean(run.mean_bytes(direction) for run in arm.runs) for direction in ("down", "up"))
        share = mean(run.share_of_dense for run in arm.runs)
        return cls(arm.label, arm.finals, down, up, share, None if target is None else price(arm, target))

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return (
            self.label,
            f"{mean_and_spread(self.accuracies)} %" if self.accuracies else "–",
            f"{self.down / 1e3:,.1f} kB",
            f"{self.up / 1e3:,.1f} kB",
            f"{100 * self.share:.1f} %",
            *([] if self.price is None else [self.price]),
        )


def write_report(
    directories: Sequence[Path], into: Path, title: str, command: str, failed: Mapping[Path, str] | None = None
) -> tuple[Table, list[Path]]:
    """Write `summary.md`, `summary.csv` and the plot of accuracy against bytes, as PNG and SVG.

    They are of all finished runs in the folder, so that what a further command runs there is added to them.

    Args:
        directories: of the finished runs.
        into: where to write.
        title: of the table and the plot.
        command: the one that made the runs, to stand beside the numbers, below those of earlier reports.
        failed: why other runs of the same command failed, by directory; the report says that they are not in it.

    Returns:
        The table for the screen, and the paths written.
    """
    failed, told = failed or {}, [History.read(directory) for directory in directories]
    earlier = _runs_in(into, {*directories, *failed})
    histories, _ = without_repeats([*told, *(run for run in earlier if run.is_finished)])
    arms = group(histories)
    aims = targets_of(arms) or reached_targets(arms)
    columns = (*COLUMNS, *(f"MB to {target:g} %" for target in aims[:1]))
    rows = [Row.of(arm, aims[0] if aims else None) for arm in arms]
    notes = [f"Failed, and not in the table: `{directory}`: {why}" for directory, why in failed.items()]
    notes += [f"Not finished, and not in the table: `{run.directory}`" for run in earlier if not run.is_finished]
    notes += [f"Made by `{each}`." for each in _commands(into / SUMMARY, command)]
    write_whole(into / SUMMARY, _markdown(title, columns, rows, histories, notes).encode())
    table = write_csv(into / TABLE, CSV_COLUMNS, csv_rows(arms))
    curves = {arm.label: arm.curves("test_accuracy", "bytes") for arm in arms}
    figure = accuracy_figure(curves, {arm.label: arm.style for arm in arms}, "bytes", title, targets_of(arms))
    written = [*(directory / METRICS_FILE for directory in directories), into / SUMMARY, table]
    return _table(title, columns, rows, histories), [*written, *save(figure, into / PLOT)]


def _runs_in(folder: Path, known: set[Path]) -> list[History]:
    """Read the runs in a folder besides those that are known; what cannot be read is none."""
    found, _ = read_all(sorted({path.parent for path in folder.glob(f"*/{METRICS_FILE}")} - known))
    return found


def _commands(summary: Path, command: str) -> list[str]:
    """Return the commands that a summary names, and this one unless it merely goes on with one of them."""
    held = re.findall(r"^Made by `(.+)`\.$", summary.read_text("utf-8"), re.MULTILINE) if summary.exists() else []
    known = command.replace(RESUME, "") in [each.replace(RESUME, "") for each in held]
    return held if known else [*held, command]


def csv_rows(arms: Sequence[Arm]) -> list[tuple[object, ...]]:
    """Return a row a run; accuracies are shares in 0…1."""
    return [_csv_row(arm, run) for arm in arms for run in arm.runs]


def rounds_of(runs: Sequence[History]) -> str:
    """Return how many rounds the runs have, the least and the most where they differ."""
    return _least_and_most([len(run.lines) for run in runs])


def _least_and_most(counts: Sequence[int]) -> str:
    return "–".join(map(str, dict.fromkeys((min(counts), max(counts)))))


def _csv_row(arm: Arm, run: History) -> tuple[object, ...]:
    evaluated = run.evaluated
    accuracies = [line["test_accuracy"] for line in evaluated]
    down, up = run.mean_bytes("down"), run.mean_bytes("up")
    settings = arm.label.removeprefix(arm.strategy).removeprefix(", ")
    scores = (accuracies[-1], max(accuracies), evaluated[-1].get("test_loss")) if evaluated else (None, None, None)
    simulated = sum(line.get("simulated_seconds", 0.0) for line in run.lines)
    return (
        *(arm.strategy, settings, run.config.get("seed"), run.directory, len(run.lines), *scores),
        *(sum(map(megabytes, run.lines)), down, up, run.share_of_dense),
        *(sum(line["failed"] for line in run.lines), sum(line["seconds"] for line in run.lines), simulated or None),
    )


def _table(title: str, columns: Sequence[str], rows: list[Row], histories: list[History]) -> Table:
    failed = _failures(histories)
    caption = f"{failed} client updates were left out; `failures` in metrics.jsonl says why" if failed else None
    table = Table(title=title, title_justify="left", caption=caption)
    for index, column in enumerate(columns):
        table.add_column(column.replace("·", " · "), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row.cells())
    return table


def _failures(histories: list[History]) -> int:
    return int(sum(line["failed"] for history in histories for line in history.lines))


def _markdown(
    title: str, columns: Sequence[str], rows: list[Row], histories: list[History], notes: Sequence[str]
) -> str:
    lines = [f"# {title}", "", f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    seeds = [len(row.accuracies) for row in rows]
    seconds = sum(line["seconds"] for history in histories for line in history.lines)
    lines += [
        "",
        f"Accuracy after the last of {rounds_of(histories)} rounds"
        + (f", mean ± standard deviation of {_least_and_most(seeds)} seeds" if max(seeds) > 1 else ", one seed")
        + f"; {seconds:.0f} s of rounds in all; {_failures(histories)} client updates failed or were rejected.",
        *(f"\n{note}" for note in notes),
        "",
        f"![Test accuracy against bytes]({PLOT})",
    ]
    return "\n".join(lines) + "\n"
