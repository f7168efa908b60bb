"""Seconds to a loss on a shared wireless channel: time-optimal draws of clients against those that ignore time.

Setup 2 of Luo et al. 2024 (arXiv 2404.13804): Synthetic(1, 1), 100 clients with power-law sizes, τ and t/f_tot from
exponential laws of mean 1 s, logistic regression from zero, 50 local steps on batches of 24 at 0.1/(1 + round), 10
draws a round. Five pilots with uniform and five with weighted draws, down to the pilot losses, give G and β/α (Eq. 35),
from which the proposed and the statistical draws follow. As published: one world, 20 runs that differ in draws and
batches, the same seeds for every scheme. Which world is not published, nor its seed: it is the one of ten whose pilots
take nearest to the published rounds, chosen by that alone. Ours: more worlds, as one world's ratios are no law.
What WHERE has the records of is not run again; what a run cut off has left in WHERE/runs is not, either.

    python benchmarks/wireless.py results/wireless [--quick] [--jobs 2]
"""

import argparse
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar, cast, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library and `train`

import numpy as np
import torch
from arrivals import EQ8, SCHEMES, bands_of, figure
from studies import write_summary
from synthetic import CLIENTS, Run, Sizes, Vector, World, make_world, received_norms, train_all
from wireless_records import Arrival, Ending, Records, Setting
from wireless_tables import BETAS, PUBLISHED_SWEEP, K, beta_name, nearest, summary

from sharding import wireless_probabilities
from sharding.clients import statistical_probabilities
from train.compare import default_jobs
from train.files import write_whole
from train.pilots import FURTHER, Lesson, conclude
from train.plots import save

PILOT_SEEDS = range(1000, 1005)  # none of a run's
PAIRED = 0.72  # the test accuracy that the paper names with the loss of the sweep over K
LAWS: tuple[Sizes, ...] = get_args(Sizes)  # in other worlds; worlds to choose from have the first

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    return [Run(world, beta_name(beta), seed, K, q) for seed in seeds]


def train_in_world(world: World, setting: Setting) -> Sequence[Run]:
    """Run the pilots of a world, and what they teach."""
    return train_all(runs_of(world, learn(world, setting), SCHEMES, [0]), setting.target, setting.rounds)


def kept(work: Callable[[Item], Result], setting: Setting, path: Path, item: Item) -> tuple[Result, float]:
    """Return what comes of an item, and the seconds that it took: those of an earlier start where there is such."""
    if path.exists():
        before, result, seconds = pickle.loads(path.read_bytes())
        if before == astuple(setting):
            return cast(Result, result), seconds
    start = time.perf_counter()
    result = work(item)
    seconds = time.perf_counter() - start
    # A tuple, as a class of this script would be kept under a name that its module has in one kind of process alone.
    write_whole(path, pickle.dumps((astuple(setting), result, seconds)))
    return result, seconds


def side_by_side(
    name: str, work: Callable[[Item], Result], items: Sequence[Item], setting: Setting, into: Path, jobs: int
) -> tuple[list[Result], float]:
    """Return what comes of each item, some at a time, each in a process of one thread, and the seconds of all.

    How many at a time changes nothing but these.
    """
    found: list[Result] = []
    spent = 0.0
    (into / "runs").mkdir(parents=True, exist_ok=True)
    paths = [into / "runs" / f"{name}-{place}.pickle" for place in range(len(items))]
    keep = partial(kept, work, setting)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) if jobs > 1 else None
    with pool or nullcontext():
        for place, (result, seconds) in enumerate((pool.map if pool else map)(keep, paths, items)):
            print(f"{name}: {place + 1} of {len(items)}", flush=True)
            found.append(result)
            spent += seconds
    return found, spent


def targets_of(runs: Sequence[Run], target: float) -> dict[int, float]:
    """Return the loss at which the schemes are compared in each world: the target, or the least that all came to."""
    worlds = {run.world.seed: [its for its in runs if its.world is run.world] for run in runs}
    return {seed: max(target, *(min(run.losses) for run in its)) for seed, its in worlds.items()}


def arrivals_of(part: str, runs: Iterable[Run], setting: Setting) -> list[Arrival]:
    """Return what is kept of some runs."""
    losses, accuracies = (setting.sweep_target, setting.target), (PAIRED, setting.accuracy)
    return [
        Arrival(
            *(part, run.scheme, run.cohort_size, run.world.seed, run.seed, len(run.losses)),
            {loss: run.seconds_to(loss) for loss in losses},
            {accuracy: run.seconds_to(accuracy=accuracy) for accuracy in accuracies},
        )
        for run in runs
    ]


def endings_of(runs: Sequence[Run], target: float) -> list[Ending]:
    """Return what is kept of runs in other worlds."""
    targets = targets_of(runs, target)
    return [
        Ending(run.scheme, its, len(run.losses), targets[its], cast(float, run.seconds_to(targets[its])))
        for run in runs
        for its in (run.world.seed,)
    ]


def train(setting: Setting, into: Path, jobs: int) -> Records:
    """Run what is missing: all pilots, then the schemes in the world chosen by them, then other worlds."""
    spent = []

    def play(name: str, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        found, seconds = side_by_side(name, work, items, setting, into, jobs)
        spent.append(seconds)
        return found

    candidates = [make_world(seed) for seed in range(setting.candidates)]
    lessons = play("pilots", partial(learn, setting=setting), candidates)
    chosen = nearest(lessons)
    lesson, world = lessons[chosen], candidates[chosen]
    pairs = [runs_of(world, lesson, SCHEMES, [seed, seed + 1]) for seed in range(0, setting.runs, 2)]
    retaught = [with_other_beta(world, lesson, beta, range(setting.runs)) for beta in BETAS]
    swept = [runs_of(world, lesson, ("proposed", "Eq. 38"), range(setting.runs), size) for size in PUBLISHED_SWEEP]
    to_target = partial(train_all, target=setting.target, rounds=setting.rounds)
    to_sweeps = partial(train_all, target=setting.sweep_target, rounds=setting.rounds)
    runs = [*chain.from_iterable(play("seeds", to_target, pairs))]
    betas = chain.from_iterable(play("betas", to_target, retaught))
    sweep = chain.from_iterable(play("draws", to_sweeps, swept))
    alone, worlds = partial(train_in_world, setting=setting), {}
    for law in LAWS:
        others = [
            make_world(seed, law) for seed in range(1, 1 + setting.worlds) if (law, seed) != (LAWS[0], world.seed)
        ]
        played = [*chain.from_iterable(play(f"{law}_worlds", alone, others))]
        worlds[law] = endings_of(played, setting.target)
    parts = {"main": runs, "beta": betas, "draws": sweep}
    kept = chain.from_iterable(arrivals_of(part, its, setting) for part, its in parts.items())
    courses = {scheme: [run for run in runs if run.scheme == scheme] for scheme in SCHEMES}
    return Records(setting, sum(spent), lessons, [*kept], worlds, bands_of(courses))


def main() -> None:
    """Run what is missing, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
    parser.add_argument("--jobs", type=int, help="processes at a time; one a core if not given")
    args = parser.parse_args()
    tell(args.into, args.quick, args.jobs or default_jobs())


def tell(into: Path, quick: bool, jobs: int) -> None:
    """Write the tables and the picture of the records, and these where they are missing."""
    setting = Setting.quick() if quick else Setting()
    records = Records.read(into, setting)
    if records is None:
        torch.set_num_threads(1)
        train(setting, into, jobs).write(into)
        records = Records.read(into, setting)
    assert records is not None
    title = "Setup 2: loss and accuracy against simulated seconds"
    save(figure(records.bands, setting.target, setting.accuracy, title), into / "wireless.png")
    write_summary(into, "wireless", ["--quick"] if quick else [], summary(records), title)


if __name__ == "__main__":
    main()
