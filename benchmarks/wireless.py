"""Seconds to a loss on a shared wireless channel: time-optimal draws of clients against those that ignore time.

Setup 2 of Luo et al. 2024 (arXiv 2404.13804): Synthetic(1, 1), 100 clients with power-law sizes, τ and t/f_tot from
exponential laws of mean 1 s, logistic regression, 50 local steps on batches of 24, 10 draws with replacement a round.
Uniform and weighted sampling run first; their first rounds, down to the pilot losses, give G and β/α (Eq. 35), from
which the proposed and the statistical draws follow. All runs of all seeds are trained as one batch of models.

    python benchmarks/wireless.py results/wireless [--seeds 20] [--target 1.1] [--rounds 2000]
"""

import argparse
import csv
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library and `train`

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from sharding import round_time, wireless_probabilities
from sharding.clients import estimate_beta_over_alpha, statistical_probabilities
from sharding.rng import generator, seed_of
from train.partition import power_law
from train.plots import save

CLIENTS, SAMPLES, FEATURES, CLASSES = 100, 20_509, 60, 10
STEPS, BATCH, LR = 50, 24, 0.1
SCHEMES = ("proposed", "eq38", "statistical", "weighted", "uniform")  # eq38: proposed, with β/α = 0
PUBLISHED = {"proposed": 9768, "statistical": 25730, "weighted": 24208, "uniform": 17514}
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """One seed's data and network: samples sorted by client, sizes, τ and t (f_tot = 1)."""

    seed: int
    inputs: Tensor
    targets: Tensor
    sizes: NDArray[np.int64]
    compute: Vector
    communicate: Vector

    @property
    def shares(self) -> Vector:
        """p_i, (N,)."""
        return self.sizes / self.sizes.sum()


@dataclass
class Run:
    """One training run and what it left: cumulative seconds and loss after each round, and mean gradient norms."""

    world: World
    scheme: str
    q: Vector
    cohort_size: int
    model: Tensor
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norm_sums: Vector = field(default_factory=lambda: np.zeros(CLIENTS))
    norm_counts: Vector = field(default_factory=lambda: np.zeros(CLIENTS))

    def rounds_to(self, loss: float) -> int | None:
        """Return the number of rounds to the loss, None if it was not reached."""
        below = np.flatnonzero(np.array(self.losses) <= loss)
        return int(below[0]) + 1 if below.size else None

    def seconds_to(self, loss: float) -> float:
        """Return the simulated seconds to the loss, NaN if it was not reached."""
        rounds = self.rounds_to(loss)
        return self.seconds[rounds - 1] if rounds else float("nan")


def make_world(seed: int) -> World:
    """Draw Synthetic(1, 1) of Li et al. 2020 (FedProx), with power-law sizes, and a network."""
    rng = generator(seed, "synthetic")
    sizes = np.array([len(part) for part in power_law(SAMPLES, CLIENTS, rng, alpha=1.0)])
    scales = np.sqrt(np.arange(1, FEATURES + 1) ** -1.2)
    inputs, targets = [], []
    for size in sizes:
        shift, center = rng.normal(0, 1), rng.normal(0, 1)
        weight, bias = rng.normal(shift, 1, (FEATURES, CLASSES)), rng.normal(shift, 1, CLASSES)
        x = rng.normal(rng.normal(center, 1, FEATURES), scales, (size, FEATURES))
        inputs.append(x)
        targets.append((x @ weight + bias).argmax(axis=1))
    x = torch.from_numpy(np.concatenate(inputs)).float()
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)  # the bias is the last row of the model
    times = rng.exponential(1, (2, CLIENTS))
    return World(seed, x, torch.from_numpy(np.concatenate(targets)), sizes, *times)


def train_all(runs: list[Run], target: float, rounds: int, pilot: float = 0.0) -> None:
    """Train all runs at once, each until its loss is at the target; note gradient norms until it is at the pilot's."""
    for t in range(rounds):
        active = [run for run in runs if not run.losses or run.losses[-1] > target]
        if not active:
            return
        cohorts = [draw(run, t) for run in active]
        updates, norms = train_cohorts(active, cohorts, t, LR / (1 + t))
        at = 0
        for run, (clients, counts) in zip(active, cohorts, strict=True):
            weights = run.world.shares[clients] * counts / (run.cohort_size * run.q[clients])
            part = slice(at, at := at + len(clients))
            run.model += torch.tensordot(torch.from_numpy(weights).float(), updates[part], dims=1)
            if not run.losses or min(run.losses) > pilot:
                run.norm_sums[clients] += norms[part]
                run.norm_counts[clients] += 1
            world = run.world
            spent = round_time(world.compute[clients], world.communicate[clients], 1.0)
            run.seconds.append(spent + (run.seconds[-1] if run.seconds else 0.0))
            run.losses.append(loss_of(run.model, world))


def draw(run: Run, t: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw a cohort with replacement: the different clients, and how often each was drawn."""
    rng = generator(run.world.seed, "invite", t, run.cohort_size)
    return np.unique(rng.choice(CLIENTS, run.cohort_size, p=run.q), return_counts=True)


def train_cohorts(
    runs: list[Run], cohorts: list[tuple[NDArray[np.int64], NDArray[np.int64]]], t: int, lr: float
) -> tuple[Tensor, Vector]:
    """Train every client of every run for STEPS steps; return the updates and mean gradient norms, row by row."""
    rng = torch.Generator().manual_seed(seed_of("batches", t))
    inputs, targets, start = [], [], []
    for run, (clients, _) in zip(runs, cohorts, strict=True):
        firsts = np.concatenate([[0], np.cumsum(run.world.sizes)])
        for client in clients:
            rows = torch.randint(int(firsts[client]), int(firsts[client + 1]), (STEPS, BATCH), generator=rng)
            inputs.append(run.world.inputs[rows])
            targets.append(run.world.targets[rows])
            start.append(run.model)
    before = torch.stack(start)
    model, total = before.clone(), torch.zeros(len(start))
    x, y = torch.stack(inputs, dim=1), torch.stack(targets, dim=1)  # (steps, rows, batch, …)
    for step in range(STEPS):
        error = (x[step] @ model).softmax(-1)
        error.scatter_add_(-1, y[step][..., None], torch.full((len(start), BATCH, 1), -1.0))
        gradient = x[step].mT @ error / BATCH
        total += gradient.flatten(1).norm(dim=1)
        model -= lr * gradient
    return model - before, (total / STEPS).numpy().astype(np.float64)


def loss_of(model: Tensor, world: World) -> float:
    """Return the global loss, over all samples."""
    return float(torch.nn.functional.cross_entropy(world.inputs @ model, world.targets))


def start_run(world: World, scheme: str, q: Vector, cohort_size: int) -> Run:
    """Return an untrained run."""
    return Run(world, scheme, q / q.sum(), cohort_size, torch.zeros(FEATURES + 1, CLASSES))


def learned(pilots: list[Run], levels: list[float]) -> tuple[Vector, float]:
    """Return G and β/α of one world from its uniform and weighted runs.

    G_i is the mean gradient norm of client i over all its pilot rounds; a client that was never drawn gets the mean.
    """
    sums, counts = (sum(getattr(run, name) for run in pilots) for name in ("norm_sums", "norm_counts"))
    norms = np.divide(sums, counts, out=np.full(CLIENTS, np.nan), where=counts > 0)
    norms = np.where(np.isnan(norms), np.nanmean(norms), norms)
    rounds = {run.scheme: [run.rounds_to(level) for level in levels] for run in pilots}
    pairs = [(u, w) for u, w in zip(rounds["uniform"], rounds["weighted"], strict=True) if u and w]
    uniform, weighted = zip(*pairs, strict=True) if pairs else ((1,), (1,))
    world, size = pilots[0].world, pilots[0].cohort_size
    return norms, estimate_beta_over_alpha(world.shares, norms, uniform, weighted, size)


def run_pair(worlds: list[World], cohort_size: int, args: argparse.Namespace) -> list[Run]:
    """Run the pilots to the end, then what they teach."""
    flat = np.full(CLIENTS, 1 / CLIENTS)
    pilots = [
        start_run(world, scheme, q, cohort_size)
        for world in worlds
        for scheme, q in (("uniform", flat), ("weighted", world.shares))
    ]
    train_all(pilots, args.target, args.rounds, min(args.pilots))
    later = []
    for place, world in enumerate(worlds):
        norms, ratio = learned(pilots[2 * place : 2 * place + 2], args.pilots)
        costs = cohort_size * world.communicate + world.compute
        best = wireless_probabilities(world.shares, norms, costs, ratio, cohort_size)
        print(f"seed {world.seed}, K = {cohort_size}: β/α = {ratio:.3g}", flush=True)
        later += [start_run(world, "proposed", best, cohort_size)]
        best = wireless_probabilities(world.shares, norms, costs, 0.0, cohort_size)
        later += [start_run(world, "eq38", best, cohort_size)]
        later += [start_run(world, "statistical", statistical_probabilities(world.shares, norms), cohort_size)]
    train_all(later, args.target, args.rounds)
    return pilots + later


def write(into: Path, runs: list[Run], sweep: list[Run], args: argparse.Namespace) -> None:
    """Write the table, the raw numbers and the figure."""
    into.mkdir(parents=True, exist_ok=True)
    with (into / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("scheme", "cohort_size", "seed", "rounds_to_target", "seconds_to_target"))
        for run in runs + sweep:
            row = (run.rounds_to(args.target), f"{run.seconds_to(args.target):.1f}")
            writer.writerow((run.scheme, run.cohort_size, run.world.seed, *row))
    lines = [
        f"# Seconds to loss {args.target}, Synthetic(1, 1), N = {CLIENTS}, K = 10, {args.seeds} seeds",
        "",
        *table(runs, args),
    ]
    lines += ["", "Seconds against the number of draws K, mean of the seeds:", ""]
    sizes = sorted({run.cohort_size for run in runs + sweep})
    lines += [f"| K (wireless) | {' | '.join(map(str, sizes))} |", "|---|" + "---:|" * len(sizes)]
    curves = {s: [mean_seconds(runs + sweep, s, size, args) for size in sizes] for s in SCHEMES}
    lines += [f"| {s}, K | " + " | ".join(f"{value:,.0f}" for value in curves[s]) + " |" for s in SCHEMES]
    lines += [
        "",
        f"Made by `python {shlex.join(sys.argv)}`.",
        "",
        "![Loss against simulated seconds](wireless.png)",
        "",
    ]
    (into / "summary.md").write_text("\n".join(lines), encoding="utf-8")
    save(figure(runs, sizes, curves, args), into / "wireless.png")


def table(runs: list[Run], args: argparse.Namespace) -> list[str]:
    """Return the rows of the main table; means are over the seeds for which every scheme reached the target."""
    seconds = np.array([[run.seconds_to(args.target) for run in runs if run.scheme == s] for s in SCHEMES])
    rounds = np.array([[run.rounds_to(args.target) or np.nan for run in runs if run.scheme == s] for s in SCHEMES])
    all_reached = np.isfinite(seconds).all(axis=0)
    means = seconds[:, all_reached].mean(axis=1)
    lines = [
        f"Means over the {all_reached.sum()} seeds for which all reached the loss within {args.rounds} rounds.",
        "",
        "| scheme (wireless) | seconds, mean ± sd | rounds | ratio | median ratio | never | published ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for place, scheme in enumerate(SCHEMES):
        published = f"{PUBLISHED[scheme] / PUBLISHED['proposed']:.1f}" if scheme in PUBLISHED else "–"
        ratios = seconds[place, all_reached] / seconds[0, all_reached]
        lines.append(
            f"| {scheme} | {means[place]:,.0f} ± {seconds[place, all_reached].std():,.0f} "
            f"| {rounds[place, all_reached].mean():.0f} | {means[place] / means[0]:.2f} | {np.median(ratios):.2f} "
            f"| {(~np.isfinite(seconds[place])).sum()} | {published} |"
        )
    return lines


def mean_seconds(runs: list[Run], scheme: str, size: int, args: argparse.Namespace) -> float:
    """Return the mean over the sweep's seeds, NaN if a run did not reach the target."""
    values = [
        run.seconds_to(args.target)
        for run in runs
        if (run.scheme, run.cohort_size) == (scheme, size) and run.world.seed < args.sweep_seeds
    ]
    return float(np.mean(values)) if values else float("nan")


def figure(runs: list[Run], sizes: list[int], curves: dict[str, list[float]], args: argparse.Namespace) -> Figure:
    """Return loss against seconds, one thin line a seed, and seconds against K."""
    drawn = Figure(figsize=(10, 4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for color, scheme in enumerate(SCHEMES):
        for run in (run for run in runs if run.scheme == scheme):
            label = scheme if run.world.seed == 0 else None
            left.plot(run.seconds, run.losses, color=f"C{color}", alpha=0.5, linewidth=0.7, label=label)
        right.plot(sizes, curves[scheme], color=f"C{color}", marker="o", label=scheme)
    left.axhline(args.target, color="0.5", linestyle=":")
    left.set(xlabel="simulated seconds", ylabel="training loss", xscale="log", yscale="log")
    right.set(xlabel="draws a round, K", ylabel=f"simulated seconds to loss {args.target}", xscale="log", yscale="log")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    return drawn


def main() -> None:
    """Run, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--target", type=float, default=1.1, help="loss to reach")
    parser.add_argument("--pilots", type=float, nargs="+", default=[1.6, 1.5, 1.4, 1.3], help="losses of the pilots")
    parser.add_argument("--rounds", type=int, default=2000, help="most rounds of a run")
    parser.add_argument("--sweep", type=int, nargs="*", default=[2, 5, 20, 40], help="other numbers of draws K")
    parser.add_argument("--sweep-seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    worlds = [make_world(seed) for seed in range(args.seeds)]
    runs = run_pair(worlds, 10, args)
    sweep = [run for size in args.sweep for run in run_pair(worlds[: args.sweep_seeds], size, args)]
    write(args.into, runs, sweep, args)
    print((args.into / "summary.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
