"""What the studies of client sampling share: run configurations one by one, and read, table and draw what they left."""

import csv
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

from matplotlib.figure import Figure

from train.compare import compare, default_jobs
from train.config import Config, load_config
from train.failures import RunError
from train.plots import Curve, Point, add_legend, draw_band, styles_of
from train.report import History, evaluations
from train.report.targets import mean_and_spread
from train.run import is_measured

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


def one_round(line: Mapping[str, Any]) -> float:
    """Count rounds."""
    return 1


def megabytes_up(line: dict[str, Any]) -> float:
    """What the clients sent to the server in a round."""
    return float(line["bytes_up"]) / 1e6


def spent_to(lines: Lines, target: float, amount: Callable[[dict[str, Any]], float]) -> float:
    """Return what had been spent at the first evaluation that reached the target, NaN if none did."""
    return next((spent for spent, accuracy in evaluations(lines, amount) if accuracy >= target), float("nan"))


def spread(values: Sequence[float], form: str = ".1f", missing: str = "never") -> str:
    """Return ``mean ± sd`` of a few seeds, and how many of them are NaN, that is `missing`: they never got there."""
    finite = [value for value in values if not isnan(value)]
    if not finite:
        return missing
    without = f" ({len(values) - len(finite)} {missing})" if len(finite) < len(values) else ""
    return f"{mean_and_spread(finite, form)}{without}"


class Evaluation(NamedTuple):
    """What had been spent when a model was evaluated, and how good it was."""

    rounds: int
    bytes_up: int
    bytes_down: int
    heard: int
    test_accuracy: float
    test_loss: float


def curve(lines: Lines) -> list[Evaluation]:
    """Return every evaluation of a run, rounded to the digits that are kept; what is no number in JSON is NaN again."""
    found, up, down, heard = [], 0, 0, 0
    for line in lines:
        up, down, heard = up + line["bytes_up"], down + line["bytes_down"], heard + line["heard"]
        if "test_accuracy" in line:
            scores = (nan if (its := line[key]) is None else round(its, 4) for key in ("test_accuracy", "test_loss"))
            found.append(Evaluation(line["round"] + 1, up, down, heard, *scores))
    return found


def write_curves(path: Path, curves: Mapping[str, Sequence[Evaluation]]) -> None:
    """Write every evaluation of every run as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("run", *Evaluation._fields))
        for name, its in curves.items():
            writer.writerows((name, *at[:4], *(f"{score:.4f}" for score in at[4:])) for at in its)


def read_curves(path: Path) -> dict[str, list[Evaluation]]:
    """Return what `write_curves` wrote, nothing where there is no file."""
    found: dict[str, list[Evaluation]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for name, *cells in list(csv.reader(file))[1:]:
                at = Evaluation(*map(int, cells[:4]), *map(float, cells[4:]))
                found.setdefault(name, []).append(at)
    return found


def write_summary(into: Path, script: str, overrides: Sequence[str], lines: Sequence[str], picture: str) -> None:
    """Write `summary.md`, and print it: these lines, the command that made them, and the picture of that title."""
    command = shlex.join(["python", f"benchmarks/{script}.py", f"results/{into.name}", *overrides])
    text = "\n".join([*lines, "", f"Made by `{command}`.", "", f"![{picture}]({script}.png)", ""])
    (into / "summary.md").write_text(text, encoding="utf-8")
    print(text)


def draw(
    groups: Mapping[str, Sequence[Lines]],
    axes_of: Mapping[str, Callable[[dict[str, Any]], float]],
    logarithmic: Sequence[str] = (),
) -> Figure:
    """Return test accuracy against each amount: one look a group, the mean of its runs in a band of one deviation."""
    styles = styles_of(groups)
    figure = Figure(figsize=(5 * len(axes_of), 4), layout="constrained")
    panels = figure.subplots(1, len(axes_of), squeeze=False)[0]
    for axes, (label, amount) in zip(panels, axes_of.items(), strict=True):
        for name, runs in groups.items():
            draw_band(axes, [_curve(lines, amount) for lines in runs], styles[name], name)
        axes.set(xlabel=label, ylabel="test accuracy (%)", xscale="log" if label in logarithmic else "linear")
        axes.grid(alpha=0.3)
    add_legend(figure, panels[0])
    return figure


def _curve(lines: Lines, amount: Callable[[dict[str, Any]], float]) -> Curve:
    points = enumerate(evaluations(lines, amount))
    return [Point(place, spent, 100 * accuracy) for place, (spent, accuracy) in points]
