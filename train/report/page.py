"""One page about any runs: what they came to, at what price, and what was run; it needs no network."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import fmean, mean
from typing import Any

from sharding.errors import UserError
from train.files import write_whole
from train.provenance import Provenance
from train.records import Layers, read_clients, read_layers
from train.report import html
from train.report.figures import (
    Drawing,
    accuracy_drawings,
    even_laws,
    law_drawings,
    lost_drawing,
    metric_drawing,
    partition_drawings,
    phase_drawing,
    spread_drawing,
)
from train.report.history import (
    AMOUNTS,
    Arm,
    History,
    differing_keys,
    find_runs,
    group,
    value_of,
    without_repeats,
    write_csv,
)
from train.report.summary import CSV_COLUMNS, csv_rows, rounds_of
from train.report.targets import mean_and_spread, price, reached_targets, spent_until, targets_of
from train.yaml_text import in_yaml

PAGE, TABLE = "report.html", "report.csv"
REASONS = 12  # so many reasons for lost updates are told


def write_page(folders: Sequence[Path], into: Path, command: str, targets: Sequence[float] = ()) -> list[Path]:
    """Write `report.html` about all runs in these folders, and `report.csv` with a row a run.

    Args:
        folders: that hold runs, or are runs.
        into: the folder to write to.
        command: to stand on the page.
        targets: accuracies in % to tell the bytes of; by default the configured ones, or three that were reached.

    Returns:
        The paths written.

    Raises:
        UserError: no run there, or a file of that name that is not from here.
    """
    found, unread = find_runs(folders)
    runs, repeats = without_repeats(found)
    page, table = into / PAGE, into / TABLE
    for path, mark in ((page, html.GENERATOR), (table, CSV_COLUMNS[0])):
        if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace")[:500]:
            raise UserError(f"{path} is not from here and would be overwritten; choose another --output")
    arms = group(runs)
    into.mkdir(parents=True, exist_ok=True)
    aims = list(targets) or targets_of(arms) or reached_targets(arms)
    columns = [f"megabytes_to_{aim:g}" for aim in aims]
    spent = [[spent_until(run, aim, "bytes") for aim in aims] for arm in arms for run in arm.runs]
    rows = [(*row, *its) for row, its in zip(csv_rows(arms), spent, strict=True)]
    write_csv(table, (*CSV_COLUMNS, *columns), rows)
    title = ", ".join(dict.fromkeys(str(run.config.get("name", run.directory.name)) for run in runs))
    missing = _unread(unread, runs) + _left_out(repeats)
    write_whole(page, html.page(title, _sections(arms, aims, command, missing)).encode())
    return [page, table]


def _sections(arms: Sequence[Arm], aims: Sequence[float], command: str, missing: str) -> Iterator[tuple[str, str]]:
    yield "Results", _results(arms, command) + missing
    yield "Accuracy", html.figures([*accuracy_drawings(arms, aims), _loss(arms)])
    yield "Bytes to a target", _targets(arms, aims)
    yield "What was sent", _laws(arms)
    yield "Who has what", _clients(arms)
    yield "Time", html.figures([phase_drawing(arms)])
    yield "Lost clients", _lost(arms)
    yield "Configuration", _configuration(arms)
    yield "Versions", _versions(arms)


def _results(arms: Sequence[Arm], command: str) -> str:
    header = ("strategy", "test accuracy", "seeds", "best", "MB moved", "of dense", "rounds", "s a round", "lost")
    rows = [_result(arm) for arm in arms]
    told = html.table(header, rows, colors=[arm.style.color for arm in arms])
    for arm in arms:
        for run in arm.runs:
            if len(run.lines) < run.config["rounds"]:
                reached = f"{run.directory} has {len(run.lines)} of {run.config['rounds']} rounds"
                why = run.why_ended or "it was cut off, or still runs"
                told += html.note(f"{reached}: {why}.", warn=not run.is_finished)
    seeds = "mean ± standard deviation over seeds; " if any(len(arm.runs) > 1 for arm in arms) else ""
    explained = f"Test accuracy after the last round in %, {seeds}MB moved by all clients, down and up, in all rounds; "
    return told + html.note(f"{explained}every run is a row of {TABLE}. Made by {command}")


def _unread(unread: Sequence[str], runs: Sequence[History]) -> str:
    told = [f"{why}; it is left out." for why in unread]
    told += [f"{run.spoiled}; the rounds before it are shown." for run in runs if run.spoiled]
    return "".join(html.note(words, warn=True) for words in told)


def _left_out(repeats: Sequence[tuple[History, History]]) -> str:
    told = (f"{run.directory} is left out: {kept.directory} has the same settings and seed." for run, kept in repeats)
    return "".join(html.note(words, warn=True) for words in told)


def _result(arm: Arm) -> tuple[str, ...]:
    lines = [line for run in arm.runs for line in run.lines]
    best = [100 * max(line["test_accuracy"] for line in run.evaluated) for run in arm.runs if run.evaluated]
    moved = [sum(map(AMOUNTS["bytes"], run.lines)) for run in arm.runs]
    share = mean(run.share_of_dense for run in arm.runs)
    return (
        arm.label,
        mean_and_spread(arm.finals) if arm.finals else "–",
        str(len(arm.runs)),
        f"{mean(best):.1f}" if best else "–",
        f"{mean(moved):,.1f}",
        f"{100 * share:.1f} %",
        rounds_of(arm.runs),
        f"{fmean(line['seconds'] for line in lines):.2f}",
        str(int(sum(line["failed"] for line in lines))),
    )


def _loss(arms: Sequence[Arm]) -> Drawing | None:
    return metric_drawing(
        arms, "train_loss", "Training loss", "The clients' mean loss in each round, on their own data."
    )


def _targets(arms: Sequence[Arm], aims: Sequence[float]) -> str:
    if not aims:
        return ""
    spent = [[[spent_until(run, aim, "bytes") for run in arm.runs] for aim in aims] for arm in arms]
    rows = [(arm.label, *(_price(arm, aim) for aim in aims)) for arm in arms]
    header = ("strategy", *(f"{aim:g} %" for aim in aims))
    dots = [
        spread_drawing(arms, [[value for value in its[place] if value is not None] for its in spent], aim)
        for place, aim in enumerate(aims)
    ]
    words = "Spent until an evaluation first reached the target; of seeds that never did, the number is told."
    return html.table(header, rows, colors=[arm.style.color for arm in arms]) + html.note(words) + html.figures(dots)


def _price(arm: Arm, aim: float) -> str:
    """Return the rounds and MB of the seeds that reached a target, and how many never did, a line each."""
    rounds = [value for run in arm.runs if (value := spent_until(run, aim, "rounds")) is not None]
    moved = price(arm, aim, " MB").replace(" (", "\n(")
    return f"{mean_and_spread(rounds, '.0f')} rounds\n{moved}" if rounds else moved


def _laws(arms: Sequence[Arm]) -> str:
    lines = [
        metric_drawing(arms, "coverage", "Coverage", "Share of the singular terms that at least one client holds."),
        metric_drawing(
            arms,
            "discrepancy",
            "Discrepancy",
            "Squared error of the clients' average reconstruction, of ‖W‖².",
            log=True,
        ),
        metric_drawing(
            arms, "anme", "Evenness", "Average normalized marginal entropy of π: 1 where all terms are equally likely."
        ),
    ]
    held = {arm.label: read_layers(arm.runs[0].directory) for arm in arms}
    held = {label: laws for label, laws in held.items() if laws}
    if not held:
        why = "π and ω are not here: these runs shard nothing, or were made before layers.jsonl was written."
        return html.figures(lines) + html.note(why)
    last = {label: max(laws)[0] + 1 for label, laws in held.items()}
    when = _when(last.values())
    shown = {label: _last_record(laws) for label, laws in held.items()}
    names = list(dict.fromkeys(name for layers in shown.values() for name in layers))
    rows = [(name, *(_evenness(layers.get(name)) for layers in shown.values())) for name in names]
    explained = html.note(f"ANME of each layer {when}, mean over keep ratios, first seed.")
    return (
        html.figures([*lines, *law_drawings(shown, arms, when)])
        + html.table(("layer", *(f"{label} (round {t})" for label, t in last.items())), rows)
        + explained
    )


def _last_record(laws: Mapping[tuple[int, str], Layers]) -> Layers:
    """Return the layers of the last round there is; those of several tasks go by the tasks' names too."""
    end, _ = max(laws)
    tasks = {task: layers for (round, task), layers in laws.items() if round == end}
    if len(tasks) == 1:
        return next(iter(tasks.values()))
    return {f"{task}/{name}": its for task, layers in tasks.items() for name, its in layers.items()}


def _when(rounds: Collection[int]) -> str:
    """Say which round is shown of each of several runs."""
    first, last = min(rounds), max(rounds)
    return f"in round {last}" if first == last else f"in each run's last record (rounds {first} to {last})"


def _evenness(laws: Any) -> str:
    value = even_laws(laws) if laws else float("nan")
    return "–" if isnan(value) else f"{value:.3f}"


def _clients(arms: Sequence[Arm]) -> str:
    spoiled = ""
    for run in (run for arm in arms for run in arm.runs):
        try:
            told = read_clients(run.directory)
        except UserError as error:
            spoiled += html.note(f"{error}.", warn=True)
            continue
        if told:
            drawings = [drawing for name, its in told.items() for drawing in partition_drawings(its, name)]
            return spoiled + html.figures(drawings) + html.note(f"Of {run.directory}; every seed deals them out anew.")
    return spoiled + html.note("Not here: no run has a clients.json that can be read; see python -m train inspect.")


def _lost(arms: Sequence[Arm]) -> str:
    reasons = Counter(
        (arm.label, str(why))
        for arm in arms
        for run in arm.runs
        for line in run.lines
        for why in line.get("failures", {}).values()
    )
    total = int(sum(line["failed"] for arm in arms for run in arm.runs for line in run.lines))
    if not total:
        return html.note("None: every client's update was used.")
    rows = [(label, why, str(count)) for (label, why), count in reasons.most_common(REASONS)]
    return html.figures([lost_drawing(arms)]) + html.table(("strategy", "why", "updates"), rows, words=True)


def _configuration(arms: Sequence[Arm]) -> str:
    settings = [arm.settings for arm in arms]
    differing = differing_keys(settings)
    shared = [(key, in_yaml(value)) for key, value in settings[0].items() if key not in differing and value is not None]
    told = ""
    if differing:
        rows = [(key, *(value_of(its, key) for its in settings)) for key in differing]
        told = html.note("What differs:") + html.table(("key", *(arm.label for arm in arms)), rows, words=True)
        told += html.note("What all have in common:")
    return told + html.table(("key", "value"), shared, words=True)


def _versions(arms: Sequence[Arm]) -> str:
    keys: dict[str, None] = {}
    rows = []
    for run in (run for arm in arms for run in arm.runs):
        its = _provenance(run)
        keys |= dict.fromkeys(its)
        rows.append((str(run.directory), str(run.config.get("seed", "–")), its))
    if not keys:
        return html.note("Not here: these runs were made before provenance.json was written.")
    return html.table(
        ("run", "seed", *keys),
        [(where, seed, *(its.get(key, "–") for key in keys)) for where, seed, its in rows],
        words=True,
    )


def _provenance(run: History) -> dict[str, str]:
    """Return what a run was made with; of one that was resumed, all that its starts had."""
    try:
        held = Provenance.read(run.directory)
    except UserError as error:
        return {"provenance": str(error)}
    if held is None:
        return {}
    told = {"engine": held.engine, "device": held.device, "threads": str(held.threads)}
    for key in dict.fromkeys(key for start in held.starts for key in start):
        told[key] = ", ".join(dict.fromkeys(str(start.get(key, "–")) for start in held.starts))
    return told
