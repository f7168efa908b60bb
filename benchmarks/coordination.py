"""Does coordinating the clients' draws help training? Accuracy against rounds on real CIFAR-10.

Runs every combination of coordination (independent, spread, shared), strategy (unbiased, collective), keep ratio,
Dirichlet α and seed on `configs/coordination.yaml`, as many at a time as there are cores, and writes a table, the raw
curves (CSV) and a figure. Cells that have been run already are not run again.

    python benchmarks/coordination.py results/coordination [rounds=30]
"""

import csv
import sys
from collections.abc import Sequence
from itertools import product
from os import cpu_count
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

from arguments import read_arguments
from matplotlib.figure import Figure
from rich.console import Console

from train.compare import compare
from train.config import Config, load_config
from train.plots import Point, add_legend, draw_band, save, styles_of
from train.progress import RoundProgress
from train.report import History

CONFIG = Path(__file__).parents[1] / "configs" / "coordination.yaml"
ALPHAS, RATIOS, STRATEGIES, SEEDS = (1, 100), (0.1, 0.2), ("unbiased", "collective"), (0, 1)
COORDINATIONS = ("independent", "spread", "shared")
Setting = tuple[float, float, str, str]  # α, r, strategy, coordination


def cells(into: Path, overrides: Sequence[str]) -> dict[tuple[Setting, int], Config]:
    """Return the configuration of every setting and seed."""
    return {
        ((alpha, ratio, strategy, coordination), seed): load_config(
            CONFIG,
            [
                *overrides,
                *(f"data.alpha={alpha}", f"keep_ratio={ratio}", f"strategy={strategy}", f"seed={seed}"),
                f"coordination={coordination}",
                f"output={into}/runs/alpha{alpha}-r{ratio}-{strategy}-{coordination}-{seed}",
            ],
        )
        for seed, alpha, ratio, strategy, coordination in product(SEEDS, ALPHAS, RATIOS, STRATEGIES, COORDINATIONS)
    }


def main(into: Path, overrides: Sequence[str]) -> None:
    """Run what is missing and write what there is."""
    wanted = cells(into, overrides)
    with RoundProgress(Console(), list(wanted.values())) as progress:
        compare(list(wanted.values()), progress.show, cpu_count() or 1, resume=True)
    curves: dict[Setting, list[History]] = {}
    for (setting, _), config in wanted.items():
        curves.setdefault(setting, []).append(History.read(config.directory))
    write_curves(into / "curves.csv", curves)
    (into / "summary.md").write_text(table(curves, overrides), encoding="utf-8")
    save(draw(read_curves(into / "curves.csv")), into / "accuracy.png")
    print(f"wrote {into}/summary.md, curves.csv and accuracy.png")


def accuracies(history: History) -> list[tuple[int, float]]:
    """Return (rounds done, test accuracy in %) of every evaluation."""
    return [(int(line["round"]) + 1, 100 * line["test_accuracy"]) for line in history.lines if "test_accuracy" in line]


def write_curves(path: Path, curves: dict[Setting, list[History]]) -> None:
    """Write every evaluation of every run as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("alpha", "keep_ratio", "strategy", "coordination", "seed", "rounds", "test_accuracy"))
        for setting, histories in curves.items():
            for seed, history in zip(SEEDS, histories, strict=True):
                writer.writerows(
                    (*setting, seed, rounds, f"{accuracy:.2f}") for rounds, accuracy in accuracies(history)
                )


def read_curves(path: Path) -> dict[Setting, list[list[Point]]]:
    """Return what `write_curves` wrote, a curve a seed."""
    found: dict[Setting, dict[str, list[Point]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            setting = float(row["alpha"]), float(row["keep_ratio"]), row["strategy"], row["coordination"]
            point = Point(int(row["rounds"]), int(row["rounds"]), float(row["test_accuracy"]))
            found.setdefault(setting, {}).setdefault(row["seed"], []).append(point)
    return {setting: list(seeds.values()) for setting, seeds in found.items()}


def table(curves: dict[Setting, list[History]], overrides: Sequence[str]) -> str:
    """Return the Markdown table: last accuracy, mean ± sd over seeds, and the mean discrepancy over the rounds."""
    rounds = len(next(iter(curves.values()))[0].lines)
    lines = [
        f"# Coordination on CIFAR-10 (lossy re-encoding), {rounds} rounds",
        "",
        f"Test accuracy in % after the last round, mean ± sd of {len(SEEDS)} seeds; in brackets the squared error of",
        "the clients' average reconstruction relative to ‖W‖², mean over rounds and seeds.",
        "",
        f"Made by `python benchmarks/coordination.py results/coordination {' '.join(overrides)}`".rstrip("` ") + "`.",
        "",
        f"| α | r | strategy | {' | '.join(COORDINATIONS)} |",
        "|---:|---:|---|" + "---:|" * len(COORDINATIONS),
    ]
    for alpha, ratio, strategy in product(ALPHAS, RATIOS, STRATEGIES):
        entries = [entry(curves[alpha, ratio, strategy, coordination]) for coordination in COORDINATIONS]
        lines.append(f"| {alpha} | {ratio} | {strategy} | {' | '.join(entries)} |")
    return "\n".join([*lines, "", "![Accuracy against rounds](accuracy.png)", ""])


def entry(histories: list[History]) -> str:
    """Return one cell of the table."""
    last = [accuracies(history)[-1][1] for history in histories]
    discrepancy = mean(line["discrepancy"] for history in histories for line in history.lines)
    return f"{mean(last):.1f} ± {stdev(last):.1f} ({discrepancy:.2f})"


def draw(curves: dict[Setting, list[list[Point]]]) -> Figure:
    """Return the figure: a panel for each α, r and strategy, a look a coordination, the mean of its seeds in a band."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    figure.suptitle("Coordinated draws on CIFAR-10: test accuracy, mean ± sd of the seeds", x=0.01, ha="left")
    styles = styles_of(COORDINATIONS)
    panels = figure.subplots(len(ALPHAS), len(RATIOS) * len(STRATEGIES), sharex=True, sharey="row")
    for row, alpha in enumerate(ALPHAS):
        for column, (ratio, strategy) in enumerate(product(RATIOS, STRATEGIES)):
            axes = panels[row, column]
            axes.set(title=f"α = {alpha}, r = {ratio}, {strategy}")
            axes.grid(alpha=0.3)
            for coordination in COORDINATIONS:
                draw_band(axes, curves[alpha, ratio, strategy, coordination], styles[coordination], coordination)
    for axes in panels[-1]:
        axes.set(xlabel="rounds")
    figure.supylabel("test accuracy (%)")
    add_legend(figure, panels[0, 0])
    return figure


if __name__ == "__main__":
    main(*read_arguments(__doc__))
