"""Five models trained at once by 120 clients, 12 uploads a round: who should send what, on real digits.

Compares probabilities from update norms, from losses, one model after the other, and all alike (Zhang et al. 2024, who
report the average accuracy of the models). Every scheme counts an upload d/p, which is unbiased. Runs that are there
already are not run again.

    python benchmarks/multi_task.py results/multi_task [rounds=40]
"""

from pathlib import Path

from arguments import read_arguments
from studies import Lines, draw, megabytes_up, run_all, spread, write_curves, write_summary

from train.config import Config, load_config
from train.plots import save

CONFIG = Path(__file__).parents[1] / "configs" / "multi_task.yaml"
SIGNALS, SEEDS = ("norm", "loss", "round_robin", "uniform"), (0, 1)


def cells(into: Path, overrides: list[str]) -> dict[str, Config]:
    """Return the configuration of every signal and seed; a seed shifts those of the tasks, and so the models."""
    base = load_config(CONFIG, overrides)
    found = {}
    for seed in SEEDS:
        tasks = {name: own | {"seed": 100 * seed + int(own.get("seed", 0))} for name, own in base.tasks.items()}
        for signal in SIGNALS:
            own = [f"clients.signal={signal}", f"seed={seed}", f"tasks={tasks}", f"output={into}/runs/{signal}-{seed}"]
            found[f"{signal}-{seed}"] = load_config(CONFIG, [*overrides, *own])
    return found


def main(into: Path, overrides: list[str]) -> None:
    """Run what is missing, and write."""
    into.mkdir(parents=True, exist_ok=True)
    configs = cells(into, overrides)
    runs = run_all(configs)
    write_curves(into / "curves.csv", runs)
    groups = {signal: [runs[f"{signal}-{seed}"] for seed in SEEDS] for signal in SIGNALS}
    save(draw(groups, {"rounds": lambda line: 1, "megabytes sent by clients": megabytes_up}), into / "multi_task.png")
    names = list(next(iter(configs.values())).tasks)
    rounds, seconds = len(groups["norm"][0]), sum(line["seconds"] for lines in runs.values() for line in lines)
    table = [
        f"# {len(names)} models at once, N = 120, m = 12, {rounds} rounds",
        "",
        f"Test accuracy in % after the last round, mean ± sd of {len(SEEDS)} seeds; {seconds:.0f} s of rounds in all.",
        "",
        f"| signal | average | {' | '.join(names)} | MB up a round | trainings a round |",
        "|---|" + "---:|" * (len(names) + 3),
        *(row(signal, groups[signal], names) for signal in SIGNALS),
    ]
    write_summary(into, "multi_task", overrides, table, "Average accuracy")


def row(signal: str, runs: list[Lines], names: list[str]) -> str:
    """Return one line of the table."""
    accuracies = [
        spread([100 * lines[-1][key] for lines in runs])
        for key in ("test_accuracy", *(f"{name}/test_accuracy" for name in names))
    ]
    lines = [line for run in runs for line in run]
    sent = sum(map(megabytes_up, lines)) / len(lines)
    trained = sum(line[f"{name}/clients"] for line in lines for name in names) / len(lines)
    return f"| {signal} | {' | '.join(accuracies)} | {sent:.2f} | {trained:.0f} |"


if __name__ == "__main__":
    main(*read_arguments(__doc__))
