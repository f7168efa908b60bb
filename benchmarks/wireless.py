"""Seconds to a loss on a shared wireless channel: time-optimal draws of clients against those that ignore time.

Setup 2 of Luo et al. 2024 (arXiv 2404.13804): Synthetic(1, 1), 100 clients with power-law sizes, τ and t/f_tot from
exponential laws of mean 1 s, logistic regression from zero, 50 local steps on batches of 24 at 0.1/(1 + round), 10
draws a round. Five pilots with uniform and five with weighted draws, down to the pilot losses, give G and β/α (Eq. 35),
from which the proposed and the statistical draws follow. As published: one world, 20 runs that differ in draws and
batches, the same seeds for every scheme. Ours: more worlds, as one world's ratios are no law.

    python benchmarks/wireless.py results/wireless [--quick] [--jobs 2]
"""

import argparse
import csv
import shlex
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library and `train`

import numpy as np
import torch
from matplotlib.figure import Figure
from synthetic import CLIENTS, Run, Vector, World, make_world, received_norms, train_all

from sharding import wireless_probabilities
from sharding.clients import estimate_beta_over_alpha, estimates_by_loss, statistical_probabilities
from train.plots import save
from train.report.targets import mean_and_spread

K = 10
SCALED, EQ8 = "uniform, scaled steps", "uniform, Eq. 8"
SCHEMES = ("proposed", "Eq. 38", "statistical", "weighted", SCALED, EQ8)
PUBLISHED = {"proposed": 9767.8, "statistical": 25730.0, "weighted": 24207.9, SCALED: 17514.3}
PUBLISHED_ROUNDS = {"uniform": (71, 81, 95, 109, 133), "weighted": (48, 57, 69, 84, 101)}
PUBLISHED_SWEEP = {1: 4778.1, 4: 617.1, 10: 1272.5, 16: 2021.6}
PILOT_SEEDS = range(1000, 1005)  # none of a run's


@dataclass(frozen=True)
class Setting:
    """What is run; `quick` is for tests, and shows nothing else."""

    target: float = 0.7
    accuracy: float = 0.78
    levels: tuple[float, ...] = (1.2, 1.15, 1.1, 1.05, 1.0)
    sweep_target: float = 1.2
    runs: int = 20
    worlds: int = 5
    rounds: int = 3000
    pilot_rounds: int = 600

    @classmethod
    def quick(cls) -> "Setting":
        """Return a setting of seconds."""
        return cls(1.95, 0.3, (2.2, 2.15, 2.1), 2.0, 2, 1, 6, 8)


@dataclass(frozen=True)
class Learned:
    """What a world's pilots teach: G, β/α as each loss has it (NaN: contradicts the bound), and their mean."""

    norms: Vector
    rounds: dict[str, list[int | None]]
    each: Vector
    ratio: float


def learn(world: World, setting: Setting) -> Learned:
    """Run the pilots of a world.

    G_i is the largest norm of client i's full gradient at the models it received from a uniform pilot, the mean of the
    pilots; a client that was never drawn gets the mean of the others. Rounds are those of the pilots' mean loss.
    """
    largest = {seed: np.full(CLIENTS, np.nan) for seed in PILOT_SEEDS}

    def watch(run: Run, t: int) -> None:
        if run.q is None:
            clients, norms = received_norms(run, t)
            largest[run.seed][clients] = np.fmax(largest[run.seed][clients], norms)

    laws = {"uniform": None, "weighted": world.shares}
    pilots = {name: [Run(world, name, seed, K, q) for seed in PILOT_SEEDS] for name, q in laws.items()}
    for runs in pilots.values():
        train_all(runs, 0.9 * min(setting.levels), setting.pilot_rounds, watch)
    seen = np.stack(list(largest.values()))
    norms = np.array([fmean(column[np.isfinite(column)]) if np.isfinite(column).any() else np.nan for column in seen.T])
    norms = np.where(np.isnan(norms), np.nanmean(norms), norms)
    rounds = {name: [_rounds_of_mean(runs, level) for level in setting.levels] for name, runs in pilots.items()}
    pairs = [(u, w) for u, w in zip(rounds["uniform"], rounds["weighted"], strict=True) if u and w]
    arguments = (world.shares, norms, [u for u, _ in pairs], [w for _, w in pairs], K)
    return Learned(norms, rounds, estimates_by_loss(*arguments), estimate_beta_over_alpha(*arguments))


def _rounds_of_mean(runs: Sequence[Run], level: float) -> int | None:
    mean = np.mean([run.losses[: min(len(other.losses) for other in runs)] for run in runs], axis=0)
    below = np.flatnonzero(mean <= level)
    return int(below[0]) + 1 if below.size else None


def law_of(scheme: str, world: World, learned: Learned, size: int) -> Vector | None:
    """Return q of a scheme, None for scaled steps."""
    shares, norms, costs = world.shares, learned.norms, size * world.communicate + world.compute
    laws = {
        "proposed": partial(wireless_probabilities, shares, norms, costs, learned.ratio, size),
        "Eq. 38": partial(wireless_probabilities, shares, norms, costs, 0.0, size),
        "statistical": partial(statistical_probabilities, shares, norms),
        "weighted": lambda: shares,
        EQ8: lambda: np.full(CLIENTS, 1 / CLIENTS),
    }
    return laws[scheme]() if scheme in laws else None


def runs_of(world: World, learned: Learned, schemes: Iterable[str], seeds: Iterable[int], size: int = K) -> list[Run]:
    """Return untrained runs."""
    laws = {scheme: law_of(scheme, world, learned, size) for scheme in schemes}
    return [Run(world, scheme, seed, size, q) for seed in seeds for scheme, q in laws.items()]


def train_groups(groups: Sequence[Sequence[Run]], target: float, rounds: int, jobs: int) -> list[Run]:
    """Train groups of runs, some at a time, each in a process of one thread; how many at a time changes nothing."""
    if jobs == 1:
        return [run for group in groups for run in train_all(group, target, rounds)]
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        trained = list(pool.map(train_all, groups, [target] * len(groups), [rounds] * len(groups)))
    return [run for runs in trained for run in runs]


def main_table(runs: Sequence[Run], setting: Setting) -> list[str]:
    """Return the table of one world."""
    lines = [
        f"| scheme | rounds to {setting.target} | seconds to {setting.target} | ratio | published ratio "
        f"| seconds to {100 * setting.accuracy:g} % | arrived |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    first = _mean([run.seconds_to(setting.target) for run in _of(runs, "proposed")])
    for scheme in SCHEMES:
        its = _of(runs, scheme)
        rounds, seconds = (
            [run.rounds_to(setting.target) for run in its],
            [run.seconds_to(setting.target) for run in its],
        )
        reached = [run.seconds_to(accuracy=setting.accuracy) for run in its]
        ratio = f"{_mean(seconds) / first:.2f}" if any(seconds) and first else "–"
        published = f"{PUBLISHED[scheme] / PUBLISHED['proposed']:.2f}" if scheme in PUBLISHED else "–"
        arrived = f"{sum(value is not None for value in seconds)} of {len(its)}"
        cells = (scheme, _spread(rounds), _spread(seconds), ratio, published, _spread(reached), arrived)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def world_table(runs: Sequence[Run], setting: Setting) -> list[str]:
    """Return each scheme's ratio to the proposed one over worlds: median, least and most."""
    lines = [
        "| scheme | worlds | median ratio | least | most | faster than proposed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    spent = {(run.scheme, run.world.seed): run.seconds_to(setting.target) for run in runs}
    worlds = sorted({run.world.seed for run in runs})
    for scheme in SCHEMES[1:]:
        pairs = [(spent[scheme, world], spent["proposed", world]) for world in worlds]
        ratios = [own / base for own, base in pairs if own and base]
        faster = sum(bool(own) and (not base or own < base) for own, base in pairs)
        numbers = (f"{median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}") if ratios else ("–",) * 3
        lines.append(
            f"| {scheme} | {len(ratios)} of {len(worlds)} | {' | '.join(numbers)} | {faster} of {len(worlds)} |"
        )
    return lines


def sweep_table(runs: Sequence[Run], setting: Setting) -> list[str]:
    """Return seconds against the number of draws."""
    sizes = sorted({run.cohort_size for run in runs})
    lines = [f"| K | {' | '.join(map(str, sizes))} |", "|---|" + "---:|" * len(sizes)]
    for scheme in ("proposed", "Eq. 38"):
        cells = [[run.seconds_to(setting.sweep_target) for run in _of(runs, scheme, size)] for size in sizes]
        lines.append(f"| {scheme} | {' | '.join(_spread(its) for its in cells)} |")
    published = [f"{PUBLISHED_SWEEP[size]:,.0f}" if size in PUBLISHED_SWEEP else "–" for size in sizes]
    return [*lines, f"| published | {' | '.join(published)} |"]


def pilot_table(learned: Learned, setting: Setting) -> list[str]:
    """Return the pilots' rounds to each loss, and β/α as each loss has it."""
    lines = [f"| loss | {' | '.join(map(str, setting.levels))} |", "|---|" + "---:|" * len(setting.levels)]
    for name, rounds in learned.rounds.items():
        lines.append(f"| {name}, rounds | {' | '.join('–' if r is None else str(r) for r in rounds)} |")
        lines.append(f"| {name}, published | {' | '.join(map(str, PUBLISHED_ROUNDS[name][: len(setting.levels)]))} |")
    each = ["contradicts" if np.isnan(value) else f"{value:.3g}" for value in learned.each]
    return [*lines, f"| β/α | {' | '.join([*each, *['–'] * (len(setting.levels) - len(each))])} |"]


def _of(runs: Iterable[Run], scheme: str, size: int = K) -> list[Run]:
    return [run for run in runs if (run.scheme, run.cohort_size) == (scheme, size)]


def _mean(values: Iterable[float | None]) -> float:
    there = [value for value in values if value is not None]
    return fmean(there) if there else 0.0


def _spread(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    missing = f" ({len(there)} of {len(values)})" if 0 < len(there) < len(values) else ""
    return f"{mean_and_spread(there, ',.0f')}{missing}" if there else "not reached"


def write_runs(path: Path, runs: Iterable[Run], targets: Sequence[float], accuracies: Sequence[float]) -> None:
    """Write a row a run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        amounts = [f"seconds_to_loss_{target:g}" for target in targets]
        writer.writerow(
            ("scheme", "K", "world", "seed", "rounds", *amounts, *(f"seconds_to_{a:g}" for a in accuracies))
        )
        for run in runs:
            spent = [run.seconds_to(target) for target in targets]
            spent += [run.seconds_to(accuracy=accuracy) for accuracy in accuracies]
            cells = ("" if value is None else f"{value:.1f}" for value in spent)
            writer.writerow((run.scheme, run.cohort_size, run.world.seed, run.seed, len(run.losses), *cells))


def figure(runs: Sequence[Run], setting: Setting) -> Figure:
    """Return loss and test accuracy against seconds, one thin line a run."""
    drawn = Figure(figsize=(10, 4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for color, scheme in enumerate(SCHEMES):
        for place, run in enumerate(_of(runs, scheme)):
            look = {"color": f"C{color}", "alpha": 0.5, "linewidth": 0.7, "label": None if place else scheme}
            left.plot(run.seconds, run.losses, **look)
            right.plot(run.seconds, [100 * accuracy for accuracy in run.accuracies], **look)
    left.axhline(setting.target, color="0.5", linestyle=":")
    left.set(xlabel="simulated seconds", ylabel="training loss", xscale="log", yscale="log")
    right.axhline(100 * setting.accuracy, color="0.5", linestyle=":")
    right.set(xlabel="simulated seconds", ylabel="test accuracy (%)", xscale="log")
    left.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return drawn


def main() -> None:
    """Run, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting.quick() if args.quick else Setting()
    args.into.mkdir(parents=True, exist_ok=True)
    world = make_world(0)
    learned = learn(world, setting)
    train = partial(train_groups, rounds=setting.rounds, jobs=args.jobs)
    groups = [runs_of(world, learned, SCHEMES, [seed, seed + 1]) for seed in range(0, setting.runs, 2)]
    runs = train(groups, setting.target)
    swept = [runs_of(world, learned, ("proposed", "Eq. 38"), range(setting.runs), size) for size in PUBLISHED_SWEEP]
    sweep = train(swept, setting.sweep_target)
    others: dict[str, list[Run]] = {}
    for law in ("zipf", "lognormal"):
        worlds = [make_world(seed, law) for seed in range(1, 1 + setting.worlds)]
        others[law] = train([runs_of(its, learn(its, setting), SCHEMES, [0]) for its in worlds], setting.target)
    write_runs(
        args.into / "runs.csv", [*runs, *sweep], (setting.sweep_target, setting.target), (0.72, setting.accuracy)
    )
    for law, its in others.items():
        write_runs(args.into / f"worlds_{law}.csv", its, (setting.target,), (setting.accuracy,))
    save(figure(runs, setting), args.into / "wireless.png")
    text = [
        f"# Seconds to loss {setting.target}: Synthetic(1, 1), N = {CLIENTS}, K = {K}",
        "",
        f"One world, {setting.runs} runs that differ in draws and batches; mean ± sd of those that arrived within "
        f"{setting.rounds} rounds.",
        *("", *main_table(runs, setting)),
        *(
            "",
            "Rounds of the pilots, by the mean loss of five runs each, and the β/α that follows at each loss. Their",
        ),
        *(f"mean, {learned.ratio:.3g}, is used; 63.88 is published, under the name α/β.", ""),
        *pilot_table(learned, setting),
        *("", f"Seconds to loss {setting.sweep_target} against the number of draws, the same β/α for every K:", ""),
        *sweep_table(sweep, setting),
    ]
    for law, its in others.items():
        text += [
            "",
            f"Other worlds, with {law} sizes, one run each; β/α and G of each world's own pilots:",
        ]
        text += ["", *world_table(its, setting)]
    text += [
        "",
        f"Made by `python {shlex.join(sys.argv)}`.",
        "",
        "![Loss and accuracy against seconds](wireless.png)",
        "",
    ]
    (args.into / "summary.md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
