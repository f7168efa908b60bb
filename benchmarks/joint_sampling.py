"""Sharding and client sampling together: a sharded ResNet on CIFAR-10, mixed keep ratios, equal bytes sent.

Of 10 clients that train, `ocs_partial` hears some, uploads worth 1.1 whole models being expected; uniform sampling
invites as many as send about as much. What clients upload is the scarce resource in both; the server sends more to the
10, and the table says how much. Runs that are there already are not run again.

    python benchmarks/joint_sampling.py results/joint_sampling [rounds=30]
"""

from pathlib import Path

from arguments import read_arguments
from studies import Lines, cells, draw, megabytes_up, run_all, spread, write_curves, write_summary

from train.plots import save
from train.report import evaluations, megabytes

CONFIG = Path(__file__).parents[1] / "configs" / "joint_sampling.yaml"
SEEDS = (0, 1)
PLAIN = ["clients.sampler=uniform", "clients.budget=null"]
SCHEMES = {
    "ocs_partial": [],
    "uniform, averaged": [*PLAIN, "clients.per_round=5"],
    "uniform, unbiased": [*PLAIN, "clients.per_round=5", "clients.replacement=true"],
    "all 10": PLAIN,
}


def accuracy_at(lines: Lines, budget: float) -> float:
    """Return the test accuracy, in %, at the last evaluation within so many megabytes up."""
    within = [accuracy for spent, accuracy in evaluations(lines, megabytes_up) if spent <= budget * 1.0001]
    return 100 * within[-1] if within else 0.0


def row(scheme: str, runs: list[Lines], budget: float) -> str:
    """Return one line of the table."""
    lines = [line for run in runs for line in run]
    up, down = (sum(line[f"bytes_{way}"] for line in lines) / len(lines) / 1e6 for way in ("up", "down"))
    heard = sum(line["heard"] for line in lines) / len(lines)
    last = spread([100 * run[-1]["test_accuracy"] for run in runs])
    equal = spread([accuracy_at(run, budget) for run in runs])
    return f"| {scheme} | {heard:.1f} | {up:.2f} | {down:.2f} | {last} | {equal} |"


def main(into: Path, overrides: list[str]) -> None:
    """Run what is missing, and write."""
    into.mkdir(parents=True, exist_ok=True)
    runs = run_all(cells(CONFIG, SCHEMES, SEEDS, into, overrides))
    write_curves(into / "curves.csv", runs)
    groups = {scheme: [runs[f"{scheme}-{seed}"] for seed in SEEDS] for scheme in SCHEMES}
    figure = draw(groups, {"megabytes sent by clients": megabytes_up, "megabytes both ways": megabytes})
    save(figure, into / "joint_sampling.png")
    budget = min(sum(map(megabytes_up, lines)) for scheme, rs in groups.items() if scheme != "all 10" for lines in rs)
    rounds, seconds = len(runs["ocs_partial-0"]), sum(line["seconds"] for lines in runs.values() for line in lines)
    table = [
        f"# Client sampling of a sharded ResNet on CIFAR-10 (lossy re-encoding), {rounds} rounds",
        "",
        f"Test accuracy in %, mean ± sd of {len(SEEDS)} seeds, after the last round and at the last evaluation within",
        f"{budget:.1f} MB sent by clients, which the thriftiest sampled run sent in all; {seconds:.0f} s in all.",
        "",
        "| hearing scheme | heard a round | MB up a round | MB down a round | last accuracy | at equal bytes up |",
        "|---|---:|---:|---:|---:|---:|",
        *(row(scheme, groups[scheme], budget) for scheme in SCHEMES),
    ]
    write_summary(into, "joint_sampling", overrides, table, "Accuracy against bytes")


if __name__ == "__main__":
    main(*read_arguments(__doc__))
