"""Simulated seconds to an accuracy on a shared wireless channel, a CNN on real MNIST: Setup 3 of Luo et al., smaller.

The time-optimal draws learn the gradients' norms on the way and need no pilot runs: β/α = 0, Eq. 38. Statistical draws
learn them too; uniform and weighted ones need none. Runs that are there already are not run again.

    python benchmarks/wireless_mnist.py results/wireless_mnist [rounds=25]
"""

from pathlib import Path
from typing import Any

from arguments import read_arguments
from studies import Lines, cells, draw, run_all, spent_to, spread, write_curves, write_summary

from train.plots import save

CONFIG = Path(__file__).parents[1] / "configs" / "wireless_mnist.yaml"
SEEDS, TARGET = (0, 1), 0.97
OTHERS = "clients.beta_over_alpha=null"
SCHEMES = {
    "time-optimal (Eq. 38)": [],
    "statistical": ["clients.sampler=statistical", OTHERS],
    "weighted": ["clients.sampler=weighted", "clients.replacement=true", OTHERS],
    "uniform": ["clients.sampler=uniform", "clients.replacement=true", OTHERS],
}


def simulated(line: dict[str, Any]) -> float:
    """What the round would have taken on the clients' network."""
    return float(line["simulated_seconds"])


def row(scheme: str, runs: list[Lines]) -> str:
    """Return one line of the table."""
    seconds = [spent_to(lines, TARGET, simulated) for lines in runs]
    rounds = [spent_to(lines, TARGET, lambda line: 1) for lines in runs]
    a_round = [sum(map(simulated, lines)) / len(lines) for lines in runs]
    last = [100 * lines[-1]["test_accuracy"] for lines in runs]
    return f"| {scheme} | {spread(seconds, '.0f')} | {spread(rounds, '.0f')} | {spread(a_round)} | {spread(last)} |"


def main(into: Path, overrides: list[str]) -> None:
    """Run what is missing, and write."""
    into.mkdir(parents=True, exist_ok=True)
    runs = run_all(cells(CONFIG, SCHEMES, SEEDS, into, overrides))
    write_curves(into / "curves.csv", runs)
    groups = {scheme: [runs[f"{scheme}-{seed}"] for seed in SEEDS] for scheme in SCHEMES}
    save(draw(groups, {"simulated seconds": simulated, "rounds": lambda line: 1}), into / "wireless_mnist.png")
    rounds, seconds = len(groups["uniform"][0]), sum(line["seconds"] for lines in runs.values() for line in lines)
    table = [
        f"# Simulated seconds to {100 * TARGET:.0f} % on MNIST, N = 100, K = 6, {rounds} rounds",
        "",
        f"Mean ± sd of {len(SEEDS)} seeds; {seconds:.0f} s of rounds in all.",
        "",
        "| draws (MNIST) | simulated seconds to target | rounds to target | seconds a round | last accuracy, % |",
        "|---|---:|---:|---:|---:|",
        *(row(scheme, groups[scheme]) for scheme in SCHEMES),
    ]
    write_summary(into, "wireless_mnist", overrides, table, "Accuracy against simulated seconds")


if __name__ == "__main__":
    main(*read_arguments(__doc__))
