"""Write the report that follows training: a table, a Markdown file, CSV files and plots."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd
from rich.table import Table

from sharding.errors import UserError
from train.report.figures import grid_drawing
from train.report.frame import mean_curve, read_runs
from train.report.groups import RunGroup, choose_targets, format_cost, group_runs, targets_of, without_repeats
from train.report.plots import add_legend, curve_figure, save
from train.report.text import NOTHING, frame_table, mean_and_spread, write_csv
from train.rundir.file_names import METRICS_FILE, REPORT_SIGN
from train.rundir.provenance import data_remarks
from train.utils.files import write_atomically

CSV_COLUMNS = (
    *("strategy", "settings", "seed", "directory", "rounds", "test_accuracy", "best_accuracy", "test_loss"),
    *("megabytes", "bytes_down_per_client_round", "bytes_up_per_client_round", "share_of_dense", "num_failed"),
    *("seconds", "simulated_seconds"),
)
SUMMARY, TABLE, PLOT, GRID = "summary.md", "summary.csv", "accuracy_vs_bytes.png", "grid.png"
RESUME = " --resume"
SECRET = "With privacy, times and lost updates are secrets, and bytes are expected ones."


def write_report(
    directories: Sequence[Path], into: Path, title: str, command: str, failed: Mapping[Path, str] | None = None
) -> tuple[Table, list[Path]]:
    """Write `summary.md`, `summary.csv`, the plot of accuracy against bytes, and that of a grid.

    They cover all finished runs in the folder, and the summary lists all commands, including earlier ones. It has the
    errors of this command's other runs, by directory. Return the table for the screen, and the paths written. Raise a
    UserError if one of the directories holds no run.
    """
    failed, requested = failed or {}, dict.fromkeys(map(str, directories))
    earlier = {path.parent for path in into.glob(f"*/{METRICS_FILE}")} - {*directories, *failed}
    all_runs, errors = read_runs([*directories, *sorted(earlier)])
    if missing := requested.keys() - {*all_runs.begun.results.index}:
        raise UserError("; ".join(errors) or f"{min(missing)} holds no run with a finished round")
    unfinished = [run for run, done in all_runs.results.is_finished.items() if not done and run not in requested]
    runs, _ = without_repeats(all_runs.subset(all_runs.results.index.drop(unfinished)))
    groups = group_runs(runs)
    results = _results(groups, choose_targets(groups)[:1])
    commands, grid = _commands(into / SUMMARY, command), grid_drawing(groups, title)
    remarks = [f"Failed, and not in the table: `{directory}`: {reason}" for directory, reason in failed.items()]
    remarks += [f"Not finished, and not in the table: `{directory}`" for directory in unfinished]
    num_failed = runs.results.num_failed.sum()
    losses = [f"{num_failed} client updates were left out; `failures` in metrics.jsonl says why"] if num_failed else []
    best = _best(groups)
    data = [f"The data are not the official ones: {remark}." for remark in data_remarks(runs.results.index)]
    listed = json.dumps(commands).replace(">", "\\u003e")  # cannot end the comment
    paragraphs = [
        f"{REPORT_SIGN}{listed} -->\n# {title}",
        frame_table(results),
        *best,
        _explained(groups, runs.results),
        *data,
        *remarks,
        *(f"Made by `{each}`." for each in commands),
        f"![Test accuracy against bytes]({PLOT})",
        *([] if grid is None else [f"![{grid.caption}]({GRID})"]),
    ]
    write_atomically(into / SUMMARY, ("\n\n".join(paragraphs) + "\n").encode())
    table = write_csv(into / TABLE, csv_frame(groups), CSV_COLUMNS)
    curves = {group.label: mean_curve(group.rounds, "test_accuracy", "bytes_total") for group in groups}
    styles = {group.label: group.style for group in groups}
    figure = curve_figure(curves, styles, "bytes_total", "test_accuracy", title, targets_of(groups))
    add_legend(figure, figure.axes[0])
    written = [into / SUMMARY, table, *save(figure, into / PLOT)]
    if grid is not None:
        written += save(grid.figure, into / GRID)
    return _screen(title, results, [*best, *data, *losses]), written


def csv_frame(groups: Sequence[RunGroup]) -> pd.DataFrame:
    """Return a row for each run, with `CSV_COLUMNS`; accuracies are shares in 0…1."""
    rows = [
        group.results.assign(
            strategy=group.strategy, settings=", ".join(f"{key}={value}" for key, value in group.varied.items())
        )
        for group in groups
    ]
    frame = pd.concat(rows).rename_axis("directory").reset_index()
    return frame.rename(columns={"num_rounds": "rounds"})


def least_and_most(counts: Iterable[int]) -> str:
    """Return ``3``, or ``3–5`` where the counts differ."""
    counts = list(counts)
    return "–".join(map(str, dict.fromkeys((min(counts), max(counts)))))


def _results(groups: Sequence[RunGroup], targets: Sequence[float]) -> pd.DataFrame:
    """Return a row of texts for each group: the strategy, the varied keys, and the results."""
    keys = list(dict.fromkeys(key for group in groups for key in group.varied))
    return pd.DataFrame([_row(group, keys, targets) for group in groups])


def _row(group: RunGroup, keys: Sequence[str], targets: Sequence[float]) -> dict[str, str]:
    means = group.results.mean(numeric_only=True)
    down, up = (means[f"bytes_{direction}_per_client_round"] / 1e3 for direction in ("down", "up"))
    return {
        "strategy": group.strategy,
        **{key: group.varied.get(key, NOTHING) for key in keys},
        "test accuracy": f"{mean_and_spread(group.percents)} %" if len(group.percents) else NOTHING,
        "kB down + up": f"2 × {down:,.1f}" if down == up else f"{down:,.1f} + {up:,.1f}",
        "of dense FedAvg's bytes": f"{100 * means.share_of_dense:.1f} %",
        **{f"MB to {100 * target:g} %": format_cost(group, target) for target in targets},
    }


def _best(groups: Sequence[RunGroup]) -> list[str]:
    """Return a line with the best point of a grid, or nothing if no key was varied."""
    scored = [group for group in groups if len(group.percents)]
    if len(scored) < 2 or not any(group.varied for group in scored):
        return []
    best = max(scored, key=lambda group: group.percents.mean())
    return [f"Best: {best.label}, {mean_and_spread(best.percents)} %."]


def _explained(groups: Sequence[RunGroup], results: pd.DataFrame) -> str:
    seeds = [len(group.percents) for group in groups]
    spread = f"mean ± standard deviation of {least_and_most(seeds)} seeds" if max(seeds) > 1 else "one seed"
    took = f"All rounds took {results.seconds.sum():.0f} s; {results.num_failed.sum()} client updates failed or were"
    return (
        f"Accuracy after the last of {least_and_most(results.num_rounds)} rounds, {spread}. kB are a client's in a "
        f"round. {SECRET if results.num_failed.isna().any() else f'{took} rejected.'}"
    )


def _screen(title: str, results: pd.DataFrame, remarks: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption="\n".join(remarks) or None, show_edge=False)
    for index, column in enumerate(results):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in results.itertuples(index=False):
        table.add_row(*row)
    return table


def _commands(summary: Path, command: str) -> list[str]:
    """Return the commands of a summary, and this one unless it only resumes one of them."""
    listed: list[str] = []
    if summary.exists() and (first := summary.read_text("utf-8").partition("\n")[0]).startswith(REPORT_SIGN):
        with suppress(ValueError):  # edited by hand
            listed = json.loads(first.removeprefix(REPORT_SIGN).removesuffix("-->"))
    is_listed = command.replace(RESUME, "") in [each.replace(RESUME, "") for each in listed]
    return listed if is_listed else [*listed, command]
