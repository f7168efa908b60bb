"""What the studies of client sampling share: run configurations one by one, and read, table and draw what they left."""

import csv
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

import numpy as np
from matplotlib.figure import Figure

from train.compare import compare, default_jobs
from train.config import Config, load_config
from train.failures import RunError
from train.plots import DASHES, Point, add_legend, draw_band, draw_targets, lay_out_log, styles_of
from train.report import History
from train.report.targets import mean_and_spread
from train.run import is_measured

LAST = 10  # rounds that the clients' loss is the mean of
DIGITS = 7  # significant ones that are kept
COUNTS, CLOCKS = ("bytes_up", "bytes_down", "heard", "trained"), ("seconds", "simulated")  # of an evaluation

Lines = list[dict[str, Any]]  # of one run's metrics.jsonl


def cells(
    path: Path, schemes: Mapping[str, Sequence[str]], seeds: Sequence[int], into: Path, overrides: Sequence[str]
) -> dict[str, Config]:
    """Return the configuration of every seed of every scheme, each with a folder of its own, as ``scheme-seed``."""
    return {
        f"{scheme}-{seed}": load_config(
            path, [*overrides, *own, f"seed={seed}", f"output={into}/runs/{folder(scheme)}-{seed}"]
        )
        for seed in seeds
        for scheme, own in schemes.items()
    }


def folder(scheme: str) -> str:
    """Return a scheme's name as that of a folder: no remark in brackets, no comma, no blank."""
    return scheme.partition(" (")[0].replace(", ", "-").replace(" ", "_")


def run_all(configs: Mapping[str, Config], jobs: int | None = None, diverging: bool = False) -> dict[str, Lines]:
    """Run what has not been run yet, so many at a time (one a core), and return every run's metrics.

    With `diverging`, trainings that diverge are no failures; they have the rounds up to where they did.

    Raises:
        RunError: a run failed; the others are done.
    """
    names, cells = list(configs), list(configs.values())
    wanted = [cell for cell in cells if not is_measured(cell)]

    def show(place: int, metrics: Mapping[str, Any]) -> None:
        if metrics["round"] == wanted[place].rounds - 1 or "stopped" in metrics:
            print(f"{names[cells.index(wanted[place])]}: {metrics['test_accuracy']:.4f}", flush=True)

    failures = compare(wanted, show, jobs or default_jobs(), resume=True)
    lost = {where: failure.why for where, failure in failures.items() if not (diverging and failure.diverged)}
    if lost:
        raise RunError("; ".join(f"{where}: {why}" for where, why in lost.items()))
    return {name: History.read(config.directory).lines for name, config in configs.items()}


def spread(values: Sequence[float], form: str = ".1f", missing: str = "never") -> str:
    """Return ``mean ± sd`` of a few seeds, and how many of them are NaN, that is `missing`: they never got there."""
    finite = [value for value in values if not isnan(value)]
    if not finite:
        return missing
    without = f" ({len(values) - len(finite)} {missing})" if len(finite) < len(values) else ""
    return f"{mean_and_spread(finite, form)}{without}"


class Evaluation(NamedTuple):
    """What had been spent when a model was evaluated, and how good it was; NaN where there is no such number.

    Attributes:
        rounds: done, as all that follows up to the scores since the start.
        bytes_up: that clients sent.
        bytes_down: that they were sent.
        heard: uploads.
        test_accuracy: in 0…1.
        test_loss: of the same samples.
        train_loss: the clients' own, mean of the last ten rounds that heard somebody.
        alpha: the improvement factor of optimal client sampling, mean of the rounds.
        trained: trainings of clients since the start, by all tasks.
        seconds: that the rounds took.
        simulated: seconds that they would have taken over the simulated network.
        train_set_loss: of all training samples.
    """

    rounds: int
    bytes_up: int
    bytes_down: int
    heard: int
    test_accuracy: float
    test_loss: float
    train_loss: float = nan
    alpha: float = nan
    trained: int = 0
    seconds: float = nan
    simulated: float = nan
    train_set_loss: float = nan


Curve = Sequence[Evaluation]
Amount = Callable[[Evaluation], float]  # of what had been spent


def curve(lines: Lines) -> list[Evaluation]:
    """Return every evaluation of a run, rounded to the digits that are kept; what is no number in JSON is NaN again."""
    found, sums = [], dict.fromkeys((*COUNTS, *CLOCKS), 0.0)
    losses, alphas = deque[float](maxlen=LAST), list[float]()
    for line in lines:
        spent = line | {"trained": _trained(line), "simulated": line.get("simulated_seconds", nan)}
        sums = {key: so_far + spent.get(key, nan) for key, so_far in sums.items()}
        if line["heard"] and "train_loss" in line:
            losses.append(_number(line["train_loss"]))
        if "improvement_alpha" in line:
            alphas.append(line["improvement_alpha"])
        if "test_accuracy" in line:
            counts = {key: int(sums[key]) for key in COUNTS}
            scores = {key: _number(line.get(key)) for key in ("test_accuracy", "test_loss", "train_set_loss")}
            scores |= {"train_loss": _mean(losses), "alpha": _mean(alphas)} | {key: sums[key] for key in CLOCKS}
            rounded = {key: float(f"{score:.{DIGITS}g}") for key, score in scores.items()}
            found.append(Evaluation(line["round"] + 1, **counts, **rounded))
    return found


def _trained(line: Mapping[str, Any]) -> int:
    tasks = [value for key, value in line.items() if key.endswith("/clients")]
    return sum(tasks) if tasks else line.get("clients", 0)


def _number(value: float | None) -> float:
    return nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else nan


def curves_of(
    configs: Mapping[str, Config],
    kept: Path,
    overrides: Sequence[str] = (),
    jobs: int | None = None,
    diverging: bool = False,
) -> dict[str, Curve]:
    """Return the curve of every run; those that have none in this file are run, as far as their folders have them not.

    The file has all of them then, so that a study's table is made again without its runs; what was run with the user's
    own overrides stands there under names that say so.

    Raises:
        RunError: a run failed; the others are done.
    """
    lines = run_all(to_run(configs, kept, overrides), jobs, diverging)
    known = read_curves(kept) | {_named(name, overrides): curve(its) for name, its in lines.items()}
    write_curves(kept, known)
    return {name: known[_named(name, overrides)] for name in configs}


def to_run(configs: Mapping[str, Config], kept: Path, overrides: Sequence[str]) -> dict[str, Config]:
    """Return the runs that have no curve in this file."""
    known = read_curves(kept)
    return {name: config for name, config in configs.items() if _named(name, overrides) not in known}


def _named(name: str, overrides: Sequence[str]) -> str:
    return " ".join([name, *overrides])


def write_curves(path: Path, curves: Mapping[str, Curve]) -> None:
    """Write every evaluation of every run as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("run", *Evaluation._fields))
        for name, its in curves.items():
            writer.writerows((name, *map(_cell, at)) for at in its)


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else "" if isnan(value) else f"{value:.{DIGITS}g}"


def read_curves(path: Path) -> dict[str, Curve]:
    """Return what `write_curves` wrote, nothing where there is no file."""
    found: dict[str, list[Evaluation]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                its = found.setdefault(row.pop("run"), [])
                its.append(
                    Evaluation(**{key: Evaluation.__annotations__[key](cell or "nan") for key, cell in row.items()})
                )
    return dict(found)


def core_hours(paths: Iterable[Path]) -> str:
    """Return how long the rounds of all runs in these files took, in words."""
    seconds = sum(its[-1].seconds for path in paths for its in read_curves(path).values())
    return f"{seconds / 3600:.1f} core-hours of rounds in all, beside other work."


def one_round(at: Evaluation) -> float:
    """Count rounds."""
    return at.rounds


def megabytes_up(at: Evaluation) -> float:
    """What the clients have sent to the server."""
    return at.bytes_up / 1e6


def spent_to(its: Curve, target: float, amount: Amount) -> float:
    """Return what had been spent at the first evaluation that reached the target, NaN if none did."""
    return next((amount(at) for at in its if at.test_accuracy >= target), nan)


def write_summary(into: Path, script: str, overrides: Sequence[str], lines: Sequence[str], picture: str) -> None:
    """Write `summary.md`, and print it: these lines, the command that made them, and the picture of that title."""
    command = shlex.join(["python", f"benchmarks/{script}.py", f"results/{into.name}", *overrides])
    text = "\n".join([*lines, "", f"Made by `{command}`.", "", f"![{picture}]({script}.png)", ""])
    (into / "summary.md").write_text(text, encoding="utf-8")
    print(text)


def accuracies(its: Curve) -> list[float]:
    """Return the test accuracy of every evaluation, in %."""
    return [100 * at.test_accuracy for at in its]


def lowest_losses(its: Curve) -> list[float]:
    """Return the lowest training loss, the clients' own, up to every evaluation; NaN before there is one."""
    return [float(lowest) for lowest in accumulate((at.train_loss for at in its), np.fmin)]


ROWS: Mapping[str, Callable[[Curve], list[float]]] = {
    "test accuracy (%)": accuracies,
    "lowest training loss": lowest_losses,
}


def draw(
    groups: Mapping[str, Sequence[Curve]],
    axes_of: Mapping[str, Amount],
    title: str,
    targets: Sequence[float] = (),
    logarithmic: Sequence[str] = (),
    rows: int = 1,
) -> Figure:
    """Return test accuracy against each amount: one look a group, the mean of its runs in a band of one deviation.

    Args:
        groups: runs that differ in their seeds alone, by name.
        axes_of: a panel each, by the name of the amount.
        title: of the picture.
        targets: test accuracies that are aimed at, in 0…1.
        logarithmic: amounts with such an axis.
        rows: 2 for the lowest training loss so far, on a logarithmic axis, below the accuracy.
    """
    # Curves may coincide, so that each has dashes of its own as well as a color.
    dashes = cycle(DASHES)
    styles = {name: replace(style, dash=next(dashes)) for name, style in styles_of(groups).items()}
    figure = Figure(figsize=(5 * len(axes_of), 1 + 3 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    panels = figure.subplots(rows, len(axes_of), squeeze=False)
    for row, (score, scores) in zip(panels, ROWS.items(), strict=False):
        for axes, (label, amount) in zip(row, axes_of.items(), strict=True):
            for name, runs in groups.items():
                draw_band(axes, [_points(its, amount, scores) for its in runs], styles[name], name)
            axes.set(xlabel=label, ylabel=score, xscale="log" if label in logarithmic else "linear")
            axes.grid(alpha=0.3)
            if scores is lowest_losses:
                lay_out_log(axes, "y")
            else:
                draw_targets(axes, [100 * target for target in targets])
    add_legend(figure, panels[0][0])
    return figure


def _points(its: Curve, amount: Amount, scores: Callable[[Curve], list[float]]) -> list[Point]:
    return [Point(place, amount(at), score) for place, (at, score) in enumerate(zip(its, scores(its), strict=True))]
