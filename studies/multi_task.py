"""Several models trained at once by the same clients with few uploads a round: which client should send which model.

This follows the two experiments of Zhang et al. 2024, who publish pictures without numbers; the abstract of their
poster has "over 30 % higher" average accuracy than other methods. A tenth of the clients has 52.6 % of the data, and
each has few classes. Pairs of client and model are chosen by norms of updates, by losses, with equal chances, or in
turn. `full`, where every client sends every model, is an upper bound. Every scheme runs with all constant step sizes of
a grid, so that schemes can be compared at one step size and at each one's best. A grid whose best is at an edge grows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from studies.curves import Curve, megabytes_up, one_round, spread
from studies.picture import draw
from studies.runner import CONFIGS, Arguments, curves_of, write_summary
from studies.uploads import search
from train.config.schema import Config, load_config
from train.report.text import markdown_table

STUDIES = {
    "multi_task": ("norm", "loss", "round_robin", "uniform", "full"),
    "multi_task_loss": ("loss", "round_robin", "uniform", "full"),
}
DATA = {
    "multi_task": "MNIST five times, instead of Fashion-MNIST; perceptrons of 32 hidden units, five full batches",
    "multi_task_loss": "MNIST twice, scikit-learn's digits and CIFAR-10, instead of Fashion-MNIST twice, MNIST "
    "and EMNIST; perceptrons of 32 hidden units, one full batch",
}
PICTURE = "Average accuracy of the five models, best steps"
COLUMNS = ("best", "minus uniform", "MB up a round", "MB down", "trainings a round")
STEPS, SEEDS = (0.01, 0.03, 0.1, 0.3, 1.0), (0, 1, 2, 3, 4)

Runs = dict[tuple[str, float], list[Curve]]  # of a study: by signal and step size, one per seed


def cell(study: str, signal: str, step: float, seed: int, into: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of one run; its seed shifts those of the tasks, and so data and models."""
    path = CONFIGS / f"{study}.yaml"
    tasks = load_config(path, overrides).tasks
    tasks = {name: own | {"seed": 100 * seed + int(own.get("seed", 0))} for name, own in tasks.items()}
    own = [f"clients.signal={signal}", f"local.lr={step}", f"seed={seed}", f"tasks={tasks}"]
    return load_config(path, [*overrides, *own, f"output={into}/runs/{study}/{name_of(signal, step, seed)}"])


def name_of(signal: str, step: float, seed: int) -> str:
    """Return the name of a run, for its folder and the file of curves."""
    return f"{signal}-lr{step}-{seed}"


def train(
    study: str, steps: Sequence[float], seeds: Sequence[int], arguments: Arguments
) -> tuple[Runs, dict[str, float]]:
    """Run what is missing of a study, and return the runs and the best step size of each signal."""
    runs: Runs = {}

    def score(wanted: Mapping[str, set[float]]) -> dict[str, dict[float, float]]:
        points = [(signal, step) for signal in wanted for step in sorted(wanted[signal])]
        configs = {
            name_of(signal, step, seed): cell(study, signal, step, seed, arguments.into, arguments.overrides)
            for seed in seeds
            for signal, step in points
        }
        found = curves_of(configs, arguments, f"{study}.csv")
        for signal, step in points:
            runs[signal, step] = [found[name_of(signal, step, seed)] for seed in seeds]
        return {signal: {step: fmean(accuracies(runs[signal, step])) for step in wanted[signal]} for signal in wanted}

    best = search(STUDIES[study], steps, score)
    return runs, best


def accuracies(runs: Sequence[Curve]) -> list[float]:
    """Return the models' average test accuracy after the last round, in %, one per seed."""
    return [100 * its[-1].test_accuracy for its in runs]


def table(study: str, runs: Runs, best: Mapping[str, float]) -> str:
    """Return a table of accuracies by step size, the gain over `uniform`, each at its best step, and the costs."""
    steps = sorted({step for _, step in runs})
    heads, rows = ["signal", *(f"step {step:g}" for step in steps), *COLUMNS], []
    for signal in STUDIES[study]:
        ends = [seed[-1] for (name, _), its in runs.items() if name == signal for seed in its]
        sent = fmean(megabytes_up(at) / at.rounds for at in ends)
        got = fmean(at.bytes_down / 1e6 / at.rounds for at in ends)
        trained = fmean(at.trained / at.rounds for at in ends)
        reached = [spread(accuracies(runs[signal, step])) if (signal, step) in runs else "–" for step in steps]
        top, uniform = runs[signal, best[signal]], runs["uniform", best["uniform"]]
        gains = [mine - theirs for mine, theirs in zip(accuracies(top), accuracies(uniform), strict=True)]
        gain, end = "–" if signal == "uniform" else spread(gains), f"{fmean(accuracies(top)):.1f}"
        rows.append([signal, *reached, end, gain, f"{sent:.2f}", f"{got:.2f}", f"{trained:.0f}"])
    return markdown_table(heads, rows)


def run(arguments: Arguments) -> None:
    """Run what is missing and write the summary."""
    seeds, picture = arguments.seeds or SEEDS, None
    text = ["# Several models at once"]
    for study, signals in STUDIES.items():
        runs, best = train(study, STEPS, seeds, arguments)
        names = list(load_config(CONFIGS / f"{study}.yaml", arguments.overrides).tasks)
        last = runs[signals[0], STEPS[0]][0][-1]
        text += [
            "",
            f"## {len(names)} models ({', '.join(names)})",
            "",
            f"{DATA[study]}. Average test accuracy in % after {last.rounds} rounds, mean ± sd of {len(seeds)} seeds.",
            "",
            table(study, runs, best),
        ]
        if study == "multi_task":
            groups = {signal: runs[signal, best[signal]] for signal in signals}
            amounts = {"rounds": one_round, "megabytes sent by clients": megabytes_up}
            picture = draw(groups, amounts, PICTURE)
    write_summary(arguments, text, picture)
