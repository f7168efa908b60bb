"""Write the report that follows training: a table, a Markdown file, CSV files and plots."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

from rich.table import Table

from train.report.arms import Arm, choose_targets, group, price, targets_of, without_repeats
from train.report.figures import grid_drawing
from train.report.history import History, data_remarks, read_all
from train.report.plots import add_legend, curve_figure, save
from train.report.text import NOTHING, markdown_table, mean_and_spread, write_csv
from train.rundir.directory import REPORT_SIGN
from train.rundir.files import METRICS_FILE
from train.runtime.files import write_whole

COLUMNS = ("test accuracy", "kB down + up", "of dense FedAvg's bytes")
CSV_COLUMNS = (
    *("strategy", "settings", "seed", "directory", "rounds", "test_accuracy", "best_accuracy", "test_loss"),
    *("megabytes", "bytes_down_per_client_round", "bytes_up_per_client_round", "share_of_dense", "failed"),
    *("seconds", "simulated_seconds"),
)
SUMMARY, TABLE, PLOT, GRID = "summary.md", "summary.csv", "accuracy_vs_bytes.png", "grid.png"
RESUME = " --resume"


def write_report(
    directories: Sequence[Path], into: Path, title: str, command: str, failed: Mapping[Path, str] | None = None
) -> tuple[Table, list[Path]]:
    """Write `summary.md`, `summary.csv`, the plot of accuracy against bytes, and that of a grid.

    They cover all finished runs in the folder, including those of earlier commands.

    Args:
        directories: of the finished runs.
        into: folder to write to.
        title: of the table and the plot.
        command: made the runs; the summary lists it after those of earlier reports.
        failed: errors of the command's other runs, by directory, for the summary.

    Returns:
        The table for the screen, and the paths written.
    """
    failed, wanted = failed or {}, [History.read(directory) for directory in directories]
    beside = sorted({path.parent for path in into.glob(f"*/{METRICS_FILE}")} - {*directories, *failed})
    earlier, _ = read_all(beside)
    runs, _ = without_repeats([*wanted, *(run for run in earlier if run.is_finished)])
    arms = group(runs)
    header, rows = _table(arms, choose_targets(arms)[:1])
    commands, grid = _commands(into / SUMMARY, command), grid_drawing(arms, title)
    remarks = [f"Failed, and not in the table: `{directory}`: {why}" for directory, why in failed.items()]
    remarks += [f"Not finished, and not in the table: `{run.directory}`" for run in earlier if not run.is_finished]
    lost = int(sum(line["failed"] for arm in arms for line in arm.lines))
    losses = [f"{lost} client updates were left out; `failures` in metrics.jsonl says why"] if lost else []
    best, data = _best(arms), [f"The data are not the official ones: {remark}." for remark in data_remarks(runs)]
    listed = json.dumps(commands).replace(">", "\\u003e")  # cannot end the comment
    paragraphs = [
        f"{REPORT_SIGN}{listed} -->\n# {title}",
        markdown_table(header, rows),
        *best,
        _explained(arms, lost),
        *data,
        *remarks,
        *(f"Made by `{each}`." for each in commands),
        f"![Test accuracy against bytes]({PLOT})",
        *([] if grid is None else [f"![{grid.caption}]({GRID})"]),
    ]
    write_whole(into / SUMMARY, ("\n\n".join(paragraphs) + "\n").encode())
    table = write_csv(into / TABLE, CSV_COLUMNS, csv_rows(arms))
    curves = {arm.label: arm.curves("test_accuracy", "bytes") for arm in arms}
    styles = {arm.label: arm.style for arm in arms}
    figure = curve_figure(curves, styles, "bytes", "test_accuracy", title, targets_of(arms))
    add_legend(figure, figure.axes[0])
    written = [into / SUMMARY, table, *save(figure, into / PLOT)]
    if grid is not None:
        written += save(grid.figure, into / GRID)
    return _screen(title, header, rows, [*best, *data, *losses]), written


def csv_rows(arms: Sequence[Arm]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each run; accuracies are shares in 0…1."""
    for arm in arms:
        varied = ", ".join(f"{key}={value}" for key, value in arm.varied.items())
        for run in arm.runs:
            scored = [line for line in run.lines if "test_accuracy" in line]
            accuracies = [line["test_accuracy"] for line in scored]
            scores = (accuracies[-1], max(accuracies), scored[-1].get("test_loss")) if scored else (None, None, None)
            yield (
                *(arm.strategy, varied, run.config.get("seed"), run.directory, len(run.lines), *scores),
                *(run.megabytes, run.mean_bytes("down"), run.mean_bytes("up"), run.share_of_dense),
                *(int(run.total("failed")), run.total("seconds"), run.total("simulated_seconds") or None),
            )


def least_and_most(counts: Sequence[int]) -> str:
    """Return ``3``, or ``3–5`` where the counts differ."""
    return "–".join(map(str, dict.fromkeys((min(counts), max(counts)))))


def _table(arms: Sequence[Arm], targets: Sequence[float]) -> tuple[list[str], list[list[str]]]:
    """Return the header and a row for each arm: the strategy, the varied keys, and the results."""
    keys = list(dict.fromkeys(key for arm in arms for key in arm.varied))
    header = ["strategy", *keys, *COLUMNS, *(f"MB to {target:g} %" for target in targets)]
    return header, [_row(arm, keys, targets) for arm in arms]


def _row(arm: Arm, keys: Sequence[str], targets: Sequence[float]) -> list[str]:
    down, up = (mean(run.mean_bytes(direction) for run in arm.runs) for direction in ("down", "up"))
    return [
        arm.strategy,
        *(arm.varied.get(key, NOTHING) for key in keys),
        f"{mean_and_spread(arm.finals)} %" if arm.finals else NOTHING,
        f"2 × {down / 1e3:,.1f}" if down == up else f"{down / 1e3:,.1f} + {up / 1e3:,.1f}",
        f"{100 * mean(run.share_of_dense for run in arm.runs):.1f} %",
        *(price(arm, target) for target in targets),
    ]


def _best(arms: Sequence[Arm]) -> list[str]:
    """Return a line with the best point of a grid, or nothing if no key was varied."""
    scored = [arm for arm in arms if arm.finals]
    if len(scored) < 2 or not any(arm.varied for arm in scored):
        return []
    best = max(scored, key=lambda arm: mean(arm.finals))
    return [f"Best: {best.label}, {mean_and_spread(best.finals)} %."]


def _explained(arms: Sequence[Arm], lost: int) -> str:
    seeds = [len(arm.finals) for arm in arms]
    spread = f"mean ± standard deviation of {least_and_most(seeds)} seeds" if max(seeds) > 1 else "one seed"
    rounds = least_and_most([len(run.lines) for arm in arms for run in arm.runs])
    seconds = sum(line["seconds"] for arm in arms for line in arm.lines)
    return (
        f"Accuracy after the last of {rounds} rounds, {spread}. kB are a client's in a round. "
        f"All rounds took {seconds:.0f} s; {lost} client updates failed or were rejected."
    )


def _screen(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption="\n".join(remarks) or None, show_edge=False)
    for index, column in enumerate(header):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _commands(summary: Path, command: str) -> list[str]:
    """Return the commands of a summary, and this one unless it only resumes one of them."""
    held: list[str] = []
    if summary.exists() and (first := summary.read_text("utf-8").partition("\n")[0]).startswith(REPORT_SIGN):
        with suppress(ValueError):  # edited by hand
            held = json.loads(first.removeprefix(REPORT_SIGN).removesuffix("-->"))
    known = command.replace(RESUME, "") in [each.replace(RESUME, "") for each in held]
    return held if known else [*held, command]
