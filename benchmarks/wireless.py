"""Seconds to a loss on a shared wireless channel: time-optimal draws of clients against those that ignore time.

Setup 2 of Luo et al. 2024 (arXiv 2404.13804): Synthetic(1, 1), 100 clients with power-law sizes, τ and t/f_tot from
exponential laws of mean 1 s, logistic regression from zero, 50 local steps on batches of 24 at 0.1/(1 + round), 10
draws a round. Five pilots with uniform and five with weighted draws, down to the pilot losses, give G and β/α (Eq. 35),
from which the proposed and the statistical draws follow. As published: one world, 20 runs that differ in draws and
batches, the same seeds for every scheme. Which world is not published, nor its seed: it is the one of ten whose pilots
take nearest to the published rounds, chosen by that alone. Ours: more worlds, as one world's ratios are no law.
Runs that are there already are not run again.

    python benchmarks/wireless.py results/wireless [--quick] [--jobs 2]
"""

import argparse
import csv
import pickle
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain
from math import exp, inf, log
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Self, TypeVar, cast

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library and `train`

import numpy as np
import torch
from arrivals import EQ8, SCALED, SCHEMES, figure, main_table, pilot_table, spread
from synthetic import CLIENTS, Run, Sizes, Vector, World, make_world, received_norms, train_all

from sharding import wireless_probabilities
from sharding.clients import statistical_probabilities
from train.files import write_whole
from train.pilots import FURTHER, Lesson, conclude
from train.plots import save

K = 10
PUBLISHED = {
    "proposed": (9767.8, 1454.3),
    "statistical": (25730.0, 2358.7),
    "weighted": (24207.9, 1884.9),
    SCALED: (17514.3, 453.8),
}
PUBLISHED_ROUNDS = {"uniform": (71, 81, 95, 109, 133), "weighted": (48, 57, 69, 84, 101)}
PUBLISHED_SWEEP = {1: 4778.1, 4: 617.1, 10: 1272.5, 16: 2021.6}
BETAS = (20.0, 63.88, 150.0)  # β/α in place of the pilots'; 63.88 is published, under the name α/β
PILOT_SEEDS = range(1000, 1005)  # none of a run's
LAWS: tuple[Sizes, ...] = ("zipf", "lognormal")  # of the sizes in other worlds

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Setting:
    """What is run; `quick` is for tests, and shows nothing else."""

    target: float = 0.7
    accuracy: float = 0.78
    levels: tuple[float, ...] = (1.2, 1.15, 1.1, 1.05, 1.0)
    sweep_target: float = 1.2
    runs: int = 20
    candidates: int = 10
    worlds: int = 5
    rounds: int = 3000
    pilot_rounds: int = 600

    @classmethod
    def quick(cls) -> "Setting":
        """Return a setting of seconds."""
        return cls(1.95, 0.3, (2.2, 2.15, 2.1), 2.0, 2, 2, 2, 6, 8)


def learn(world: World, setting: Setting) -> Lesson:
    """Run the pilots of a world; G is of the full gradient at the models that the clients received."""
    largest = {seed: np.full(CLIENTS, np.nan) for seed in PILOT_SEEDS}

    def watch(run: Run, t: int) -> None:
        if run.q is None:
            clients, norms = received_norms(run, t)
            largest[run.seed][clients] = np.fmax(largest[run.seed][clients], norms)

    laws = {"uniform": None, "weighted": world.shares}
    pilots = {name: [Run(world, name, seed, K, q) for seed in PILOT_SEEDS] for name, q in laws.items()}
    for runs in pilots.values():
        train_all(runs, FURTHER * min(setting.levels), setting.pilot_rounds, watch)
    curves = {name: [run.losses for run in runs] for name, runs in pilots.items()}
    return conclude(world.shares, list(largest.values()), curves, setting.levels, K)


def law_of(scheme: str, world: World, lesson: Lesson, size: int) -> Vector | None:
    """Return q of a scheme, None for scaled steps."""
    shares, norms, costs = world.shares, np.array(lesson.gradient_norms), size * world.communicate + world.compute
    laws = {
        "proposed": partial(wireless_probabilities, shares, norms, costs, lesson.beta_over_alpha, size),
        "Eq. 38": partial(wireless_probabilities, shares, norms, costs, 0.0, size),
        "statistical": partial(statistical_probabilities, shares, norms),
        "weighted": lambda: shares,
        EQ8: lambda: np.full(CLIENTS, 1 / CLIENTS),
    }
    return laws[scheme]() if scheme in laws else None


def runs_of(world: World, lesson: Lesson, schemes: Iterable[str], seeds: Iterable[int], size: int = K) -> list[Run]:
    """Return untrained runs."""
    laws = {scheme: law_of(scheme, world, lesson, size) for scheme in schemes}
    return [Run(world, scheme, seed, size, q) for seed in seeds for scheme, q in laws.items()]


def with_other_beta(world: World, lesson: Lesson, beta: float, seeds: Iterable[int]) -> list[Run]:
    """Return untrained runs of the proposed draws with this β/α."""
    q = law_of("proposed", world, replace(lesson, beta_over_alpha=beta), K)
    return [Run(world, _beta(beta), seed, K, q) for seed in seeds]


def train_in_world(world: World, setting: Setting) -> Sequence[Run]:
    """Run the pilots of a world, and what they teach."""
    return train_all(runs_of(world, learn(world, setting), SCHEMES, [0]), setting.target, setting.rounds)


def kept(work: Callable[[Item], Result], setting: Setting, path: Path, item: Item) -> Result:
    """Return what comes of an item: that of an earlier start where there is such."""
    if path.exists():
        before, result = pickle.loads(path.read_bytes())
        if before == astuple(setting):
            return cast(Result, result)
    result = work(item)
    # A tuple, as a class of this script would be kept under a name that its module has in one kind of process alone.
    write_whole(path, pickle.dumps((astuple(setting), result)))
    return result


def side_by_side(
    name: str, work: Callable[[Item], Result], items: Sequence[Item], setting: Setting, into: Path, jobs: int
) -> list[Result]:
    """Return what comes of each item, some at a time, each in a process of one thread; how many changes nothing."""
    found: list[Result] = []
    (into / "runs").mkdir(parents=True, exist_ok=True)
    paths = [into / "runs" / f"{name}-{place}.pickle" for place in range(len(items))]
    work = partial(kept, work, setting)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) if jobs > 1 else None
    with pool or nullcontext():
        for place, result in enumerate((pool.map if pool else map)(work, paths, items)):
            print(f"{name}: {place + 1} of {len(items)}", flush=True)
            found.append(result)
    return found


def distance(lesson: Lesson) -> float:
    """Return how far the pilots' rounds are from the published ones: the mean size of the logarithm of their ratio."""
    pairs = [pair for name, its in PUBLISHED_ROUNDS.items() for pair in zip(lesson.rounds[name], its, strict=False)]
    return fmean(inf if rounds is None else abs(log(rounds / published)) for rounds, published in pairs)


def targets_of(runs: Sequence[Run], target: float) -> dict[int, float]:
    """Return the loss at which the schemes are compared in each world: the target, or the least that all came to."""
    worlds = {run.world.seed: [it for it in runs if it.world is run.world] for run in runs}
    return {seed: max(target, *(min(run.losses) for run in its)) for seed, its in worlds.items()}


def world_table(runs: Sequence[Run], target: float) -> list[str]:
    """Return each scheme's ratio to the proposed one over worlds: median, least and most."""
    lines = ["| scheme | median ratio | least | most | faster than proposed |", "|---|---:|---:|---:|---:|"]
    targets = targets_of(runs, target)
    spent = {(run.scheme, run.world.seed): cast(float, run.seconds_to(targets[run.world.seed])) for run in runs}
    for scheme in SCHEMES[1:]:
        ratios = [spent[scheme, seed] / spent["proposed", seed] for seed in targets]
        cells = (f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios)))
        faster = sum(ratio < 1 for ratio in ratios)
        lines.append(f"| {scheme} | {' | '.join(cells)} | {faster} of {len(ratios)} |")
    return lines


def sweep_table(runs: Sequence[Run], setting: Setting) -> list[str]:
    """Return seconds against the number of draws."""
    sizes = sorted({run.cohort_size for run in runs})
    lines = [f"| K | {' | '.join(map(str, sizes))} |", "|---|" + "---:|" * len(sizes)]
    for scheme in ("proposed", "Eq. 38"):
        cells = [[run.seconds_to(setting.sweep_target) for run in _of(runs, scheme, size)] for size in sizes]
        lines.append(f"| {scheme} | {' | '.join(spread(its) for its in cells)} |")
    published = [f"{PUBLISHED_SWEEP[size]:,.0f}" if size in PUBLISHED_SWEEP else "–" for size in sizes]
    return [*lines, f"| published | {' | '.join(published)} |"]


def beta_table(study: "Study", setting: Setting) -> list[str]:
    """Return seconds of the proposed draws against β/α."""
    own = study.lesson.beta_over_alpha
    spent = {own: _of(study.runs, "proposed")} | {beta: _of(study.betas, _beta(beta)) for beta in BETAS}
    betas = sorted(spent)
    cells = [spread([run.seconds_to(setting.target) for run in spent[beta]]) for beta in betas]
    heads = [f"{beta:.4g}{' (pilots)' if beta == own else ''}" for beta in betas]
    return [f"| β/α | {' | '.join(heads)} |", "|---|" + "---:|" * len(betas), f"| proposed | {' | '.join(cells)} |"]


def _beta(beta: float) -> str:
    return f"proposed, β/α = {beta:g}"


def _of(runs: Iterable[Run], scheme: str, size: int = K) -> list[Run]:
    return [run for run in runs if (run.scheme, run.cohort_size) == (scheme, size)]


def write_runs(path: Path, runs: Iterable[Run], targets: Sequence[float], accuracies: Sequence[float]) -> None:
    """Write a row a run."""
    amounts = [f"seconds_to_loss_{target:g}" for target in targets] + [f"seconds_to_{a:g}" for a in accuracies]
    rows: list[tuple[object, ...]] = [("scheme", "K", "world", "seed", "rounds", *amounts)]
    for run in runs:
        spent = [run.seconds_to(target) for target in targets]
        spent += [run.seconds_to(accuracy=accuracy) for accuracy in accuracies]
        cells = ("" if value is None else f"{value:.1f}" for value in spent)
        rows.append((run.scheme, run.cohort_size, run.world.seed, run.seed, len(run.losses), *cells))
    _write(path, rows)


def write_worlds(path: Path, runs: Sequence[Run], target: float) -> None:
    """Write a row a run, with the loss at which its world is compared."""
    targets = targets_of(runs, target)
    rows: list[tuple[object, ...]] = [("scheme", "world", "rounds", "loss", "seconds_to_loss")]
    for run in runs:
        its = targets[run.world.seed]
        rows.append((run.scheme, run.world.seed, len(run.losses), f"{its:.4f}", f"{run.seconds_to(its):.1f}"))
    _write(path, rows)


def _write(path: Path, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


@dataclass(frozen=True)
class Study:
    """All that is run.

    Attributes:
        lesson: of the pilots of the one world, that of `runs`.
        runs: of all schemes in it, to the target.
        betas: of the proposed draws in it, with other values of β/α.
        sweep: of the wireless draws, by how many are drawn, to a target of their own.
        others: of all schemes in other worlds, by the law of the sizes there.
    """

    lesson: Lesson
    runs: Sequence[Run]
    betas: Sequence[Run]
    sweep: Sequence[Run]
    others: Mapping[str, Sequence[Run]]

    @classmethod
    def train(cls, setting: Setting, into: Path, jobs: int) -> Self:
        """Run what is missing."""
        play = partial(side_by_side, setting=setting, into=into, jobs=jobs)
        candidates = [make_world(seed) for seed in range(setting.candidates)]
        lessons = play("pilots", partial(learn, setting=setting), candidates)
        lesson, world = min(zip(lessons, candidates, strict=True), key=lambda pair: distance(pair[0]))
        pairs = [runs_of(world, lesson, SCHEMES, [seed, seed + 1]) for seed in range(0, setting.runs, 2)]
        retaught = [with_other_beta(world, lesson, beta, range(setting.runs)) for beta in BETAS]
        swept = [runs_of(world, lesson, ("proposed", "Eq. 38"), range(setting.runs), size) for size in PUBLISHED_SWEEP]
        train = partial(train_all, target=setting.target, rounds=setting.rounds)
        runs = chain.from_iterable(play("seeds", train, pairs))
        betas = chain.from_iterable(play("betas", train, retaught))
        train = partial(train_all, target=setting.sweep_target, rounds=setting.rounds)
        sweep = chain.from_iterable(play("draws", train, swept))
        seeds = range(1, 1 + setting.worlds)
        worlds = {law: [make_world(it, law) for it in seeds if (law, it) != ("zipf", world.seed)] for law in LAWS}
        alone = partial(train_in_world, setting=setting)
        others = {law: [*chain.from_iterable(play(f"{law}_worlds", alone, its))] for law, its in worlds.items()}
        return cls(lesson, [*runs], [*betas], [*sweep], others)


def write(study: Study, setting: Setting, into: Path) -> None:
    """Write runs, picture and summary."""
    targets, accuracies = (setting.sweep_target, setting.target), (0.72, setting.accuracy)
    write_runs(into / "runs.csv", [*study.runs, *study.betas, *study.sweep], targets, accuracies)
    for law, its in study.others.items():
        write_worlds(into / f"worlds_{law}.csv", its, setting.target)
    courses = {scheme: _of(study.runs, scheme) for scheme in SCHEMES}
    title = "Setup 2: loss and accuracy against simulated seconds"
    save(figure(courses, setting.target, setting.accuracy, title), into / "wireless.png")
    text = "\n".join([*summary(study, setting, courses), ""])
    (into / "summary.md").write_text(text, encoding="utf-8")
    print(text)


def summary(study: Study, setting: Setting, courses: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return what stands in the summary."""
    text = [
        f"# Seconds to loss {setting.target}: Synthetic(1, 1), N = {CLIENTS}, K = {K}",
        "",
        f"Of {setting.candidates} worlds the one whose pilots are nearest to the published ones: number "
        f"{study.runs[0].world.seed}, off by a factor of {exp(distance(study.lesson)):.2f} in the geometric mean.",
        f"{setting.runs} runs that differ in draws and batches; mean ± sd of those that arrived within "
        f"{setting.rounds} rounds.",
        "",
        *main_table(courses, setting.target, setting.accuracy, PUBLISHED),
        "",
        "Rounds of the pilots, by the mean loss of five runs each, and the β/α that follows at each loss. Their",
        f"mean, {study.lesson.beta_over_alpha:.3g}, is used; 63.88 is published, under the name α/β.",
        "",
        *pilot_table(study.lesson, setting.levels, PUBLISHED_ROUNDS),
        "",
        f"Seconds to loss {setting.target} with another β/α than the pilots':",
        "",
        *beta_table(study, setting),
        "",
        f"Seconds to loss {setting.sweep_target} against the number of draws, the same β/α for every K:",
        "",
        *sweep_table(study.sweep, setting),
    ]
    for law, its in study.others.items():
        reached = ", ".join(f"{target:.2f}" for target in targets_of(its, setting.target).values())
        text += ["", f"Other worlds, with {law} sizes, one run each; β/α and G of each world's own pilots. To loss"]
        text += [f"{setting.target} or the least that all schemes reach within {setting.rounds} rounds: {reached}.", ""]
        text += world_table(its, setting.target)
    made = f"Made by `python {shlex.join(sys.argv)}`."
    return [*text, "", made, "", "![Loss and accuracy against seconds](wireless.png)"]


def main() -> None:
    """Run, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting.quick() if args.quick else Setting()
    write(Study.train(setting, args.into, args.jobs), setting, args.into)


if __name__ == "__main__":
    main()
