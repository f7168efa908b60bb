"""Most clients small, a few large: rounds and bits to an accuracy when 3 of 32 clients upload, on real MNIST.

Compares full participation, OCS, AOCS and uniform sampling, each at its best step size of a small grid (by rounds to
the target, seed 0), as Chen, Horváth & Richtárik (TMLR 2022) do on FEMNIST. Uniform sampling is run twice: unbiased, as
published (each upload counts n/m; here 3 draws with replacement), and as the plain average of 3 clients. Runs that are
there already are not run again.

    python benchmarks/uneven_clients.py results/uneven_clients [rounds=60]
"""

from math import isnan
from pathlib import Path

from arguments import read_arguments
from studies import (
    Lines,
    draw,
    folder,
    megabytes_up,
    run_all,
    spent_to,
    spread,
    write_curves,
    write_summary,
)

from train.config import Config, load_config
from train.plots import save
from train.report import evaluations

CONFIG = Path(__file__).parents[1] / "configs" / "uneven_clients.yaml"
RATES, SEEDS, TARGET = (0.03, 0.1, 0.3), (0, 1, 2), 0.94
SCHEMES = {
    "full": ["clients.sampler=uniform", "clients.budget=null"],
    "ocs": ["clients.sampler=ocs"],
    "aocs": ["clients.sampler=aocs"],
    "uniform, unbiased": [
        *("clients.sampler=uniform", "clients.budget=null", "clients.per_round=3", "clients.replacement=true"),
    ],
    "uniform, averaged": ["clients.sampler=uniform", "clients.budget=null", "clients.per_round=3"],
}


def cell(into: Path, overrides: list[str], scheme: str, rate: float, seed: int) -> dict[str, Config]:
    """Return one configuration under its name."""
    name = f"{folder(scheme)}-lr{rate}-{seed}"
    own = [*SCHEMES[scheme], f"local.lr={rate}", f"seed={seed}", f"output={into}/runs/{name}"]
    return {name: load_config(CONFIG, [*overrides, *own])}


def count_round(line: dict[str, float]) -> float:
    """One round."""
    return 1


def megabits(line: dict[str, float]) -> float:
    """What the clients sent to the server in a round."""
    return 8 * megabytes_up(line)


def badness(lines: Lines) -> tuple[float, float]:
    """Order step sizes: fewest rounds to the target first, then best last accuracy."""
    rounds = spent_to(lines, TARGET, count_round)
    return (float("inf") if isnan(rounds) else rounds, -lines[-1]["test_accuracy"])


def row(scheme: str, rate: float, runs: list[Lines]) -> str:
    """Return one line of the table."""
    rounds, bits = ([spent_to(lines, TARGET, of) for lines in runs] for of in (count_round, megabits))
    last = [100 * lines[-1]["test_accuracy"] for lines in runs]
    best = [100 * max(accuracy for _, accuracy in evaluations(lines, count_round)) for lines in runs]
    alphas = [line["improvement_alpha"] for lines in runs for line in lines if "improvement_alpha" in line]
    alpha = f"{sum(alphas) / len(alphas):.2f}" if alphas else "–"
    cells = (scheme, f"{rate:g}", spread(rounds, ".0f"), spread(bits, ",.1f"), spread(last), spread(best), alpha)
    return f"| {' | '.join(cells)} |"


def main(into: Path, overrides: list[str]) -> None:
    """Run the grid, then the other seeds at the best rates, and write."""
    into.mkdir(parents=True, exist_ok=True)
    runs, chosen = {}, {}
    for scheme in SCHEMES:
        grid = {rate: cell(into, overrides, scheme, rate, SEEDS[0]) for rate in RATES}
        found = {rate: next(iter(run_all(config).values())) for rate, config in grid.items()}
        runs |= {name: found[rate] for rate, config in grid.items() for name in config}
        best = min(RATES, key=lambda rate: badness(found[rate]))
        for seed in SEEDS[1:]:
            runs |= run_all(cell(into, overrides, scheme, best, seed))
        prefix = f"{folder(scheme)}-lr{best}-"
        chosen[scheme] = (best, [lines for name, lines in runs.items() if name.startswith(prefix)])
    write_curves(into / "curves.csv", runs)
    bits = "megabits sent by clients"
    figure = draw({s: r for s, (_, r) in chosen.items()}, {"rounds": count_round, bits: megabits}, logarithmic=[bits])
    save(figure, into / "uneven_clients.png")
    rounds = len(next(iter(runs.values())))
    lines = [
        f"# Uneven clients on MNIST, {rounds} rounds, target {100 * TARGET:.0f} %",
        "",
        f"Mean ± sd of {len(SEEDS)} seeds, each scheme at the best step size of {', '.join(map(str, RATES))}. α is the",
        "improvement factor, mean over rounds: 0 is as good as full participation, 1 as uniform.",
        "",
        "| upload scheme | step size | rounds to target | Mbit up to target | last accuracy, % | best, % | α |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(row(scheme, *chosen[scheme]) for scheme in SCHEMES),
    ]
    write_summary(into, "uneven_clients", overrides, lines, "Accuracy against rounds and bits")


if __name__ == "__main__":
    main(*read_arguments(__doc__))
