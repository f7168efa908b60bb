"""What could beat the published algorithm at the same bytes and the same work of a client: CIFAR-10, r = 0.1.

The medium scale of the paper's column (configs/beyond.yaml). Every method moves the bytes of `collective` and has its
clients do its multiply-adds, or less; those that send more a round have fewer rounds. Numbers of a method were chosen
on other data or another seed than those reported, and are in `METHODS`. Runs that are there already are not run again,
and one that was cut off goes on.

    python benchmarks/beyond.py results/beyond [--only METHOD …] [--seeds 0 1 2] [KEY=VALUE …]
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean, stdev

from studies import Lines, run_all, write_curves
from width import run as run_width

from train.config import load_config
from train.lines import read_lines

CONFIG = Path(__file__).parents[1] / "configs" / "beyond.yaml"
BASELINE = "collective"
# β and η_g of the server's optimizers: tried on the digits of the quickstart, seeds 0 and 1.
METHODS: dict[str, Sequence[str]] = {
    "collective": ["strategy=collective"],
    "top_n": ["strategy=top_n"],
    "prism_wallenius_clip": ["strategy=prism_wallenius_clip"],
    "dense, an eighth of the rounds": ["strategy=dense", "rounds=50", "evaluate_every=5"],
    "collective, look_ahead": [
        *("strategy=collective", "server_optimizer=look_ahead", "server_momentum=0.8", "server_lr=0.4")
    ],
}
WIDTHS = {"width, static": "static", "width, rolling": "rolling"}


def main(words: Sequence[str]) -> None:
    """Run what is missing, and write a table of what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, metavar="WHERE")
    parser.add_argument("--only", nargs="*", choices=[*METHODS, *WIDTHS], metavar="METHOD", default=[*METHODS, *WIDTHS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args(words)
    train(args.into, args.only, args.seeds, args.overrides)
    runs = read(args.into)
    write_curves(args.into / "curves.csv", {f"{m}-{s}": lines for m, its in runs.items() for s, lines in its.items()})
    text = [
        "# Beyond the published algorithm: CIFAR-10 (a lossy re-encoding), r = 0.1, medium scale",
        "",
        *table(runs),
        "",
        f"Made by `python {shlex.join(['benchmarks/beyond.py', *words])}`.",
        "",
    ]
    (args.into / "summary.md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


def train(into: Path, methods: Sequence[str], seeds: Sequence[int], overrides: Sequence[str]) -> None:
    """Run these methods with these seeds, as far as it has not been done."""
    configs = {
        f"{method}-{seed}": load_config(
            CONFIG, [*METHODS[method], *overrides, f"seed={seed}", f"output={into}/runs/{folder(method)}-{seed}"]
        )
        for seed in seeds
        for method in methods
        if method in METHODS
    }
    run_all(configs)
    for method, seed in ((method, seed) for seed in seeds for method in methods if method in WIDTHS):
        config = load_config(CONFIG, ["strategy=collective", *overrides, f"seed={seed}"])
        place = into / "runs" / f"{folder(method)}-{seed}"
        if len(lines_of(place)) < config.rounds:
            run_width(config, WIDTHS[method], place)


def folder(method: str) -> str:
    """Return the name of a method's folder."""
    return method.replace(", ", "-").replace(" ", "_")


def lines_of(place: Path) -> Lines:
    """Return the metrics of a run, none where there is none."""
    return read_lines(place / "metrics.jsonl")


def read(into: Path) -> dict[str, dict[int, Lines]]:
    """Return the metrics of all whole runs that there are: method -> seed -> lines."""
    found: dict[str, dict[int, Lines]] = {}
    for method in (*METHODS, *WIDTHS):
        for place in sorted((into / "runs").glob(f"{folder(method)}-[0-9]*")):
            lines = lines_of(place)
            if lines and "test_accuracy" in lines[-1]:
                found.setdefault(method, {})[int(place.name.rpartition("-")[2])] = lines
    return found


def table(runs: Mapping[str, Mapping[int, Lines]]) -> list[str]:
    """Return a row a method: accuracy on the way and at the end, and the paired difference to `collective`."""
    parts = (0.25, 0.5, 0.75)
    head = ("method", "rounds", "GB", "seeds", *(f"{100 * part:.0f} % of it" for part in parts), "end", "best")
    lines = [f"| {' | '.join(head)} | end, less {BASELINE}'s |", "|---|" + "---:|" * len(head)]
    for method, its in runs.items():
        one = next(iter(its.values()))
        moved = sum(line["bytes_up"] + line["bytes_down"] for line in one) / 1e9
        courses = [[accuracy_near(run, part) for run in its.values()] for part in (*parts, 1.0)]
        best = [100 * max(line["test_accuracy"] for line in run if "test_accuracy" in line) for run in its.values()]
        cells = [method, str(len(one)), f"{moved:.1f}", ", ".join(map(str, its)), *map(spread, [*courses, best])]
        lines.append(f"| {' | '.join(cells)} | {difference(its, runs.get(BASELINE, {}))} |")
    return lines


def accuracy_near(lines: Lines, part: float) -> float:
    """Return the mean accuracy, in %, of the evaluations in the fifth of a run that ends with a part of it.

    Of the whole it is the last one's; where there was none in that fifth, NaN.
    """
    scores = {t: 100 * line["test_accuracy"] for t, line in enumerate(lines, start=1) if "test_accuracy" in line}
    last = part * len(lines)
    seen = [score for t, score in scores.items() if last - len(lines) / 5 <= t <= last]
    return scores[len(lines)] if part == 1 else fmean(seen) if seen else nan


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation, the mean alone of one, a dash where one is missing."""
    if any(map(isnan, values)):
        return "–"
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def difference(mine: Mapping[int, Lines], theirs: Mapping[int, Lines]) -> str:
    """Return the mean difference of the last accuracies seed by seed, ± its standard error."""
    seeds = sorted(set(mine) & set(theirs))
    if not seeds or mine is theirs:
        return "–"
    gaps = [100 * (mine[seed][-1]["test_accuracy"] - theirs[seed][-1]["test_accuracy"]) for seed in seeds]
    error = f" ± {stdev(gaps) / len(gaps) ** 0.5:.1f}" if len(gaps) > 1 else " (one seed)"
    return f"{fmean(gaps):+.1f}{error}"


if __name__ == "__main__":
    main(sys.argv[1:])
