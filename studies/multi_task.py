"""Several models trained at once by the same clients with few uploads a round: which client should send which model.

This follows the two experiments of Zhang et al. 2024, who publish pictures without numbers; the abstract of their
poster has "over 30 % higher" average accuracy than other methods. A tenth of the clients has 52.6 % of the data, and
each has few classes. Pairs of client and model are chosen by norms of updates, by losses, with equal chances, or in
turn. `full`, where every client sends every model, is an upper bound. Every scheme runs with all constant step sizes of
a grid, so that schemes can be compared at one step size and at each one's best. A grid whose best is at an edge grows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from studies.curves import ends, mean_and_error, spread
from studies.picture import draw
from studies.runner import CONFIGS, Arguments, curves_of, write_summary
from studies.uploads import search
from train.config.schema import Config, load_config
from train.report.text import NOTHING, frame_table

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
STEPS, SEEDS = (0.01, 0.03, 0.1, 0.3, 1.0), (0, 1, 2, 3, 4)


def config_of(study: str, signal: str, step: float, seed: int, into: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of one run; its seed shifts those of the tasks, and so data and models."""
    path = CONFIGS / f"{study}.yaml"
    tasks = load_config(path, overrides).tasks
    tasks = {name: keys | {"seed": 100 * seed + int(keys.get("seed", 0))} for name, keys in tasks.items()}
    keys = [f"clients.sampler.signal={signal}", f"local.optimizer.lr={step}", f"seed={seed}", f"tasks={tasks}"]
    return load_config(path, [*overrides, *keys, f"output={into}/runs/{study}/{name_of(signal, step, seed)}"])


def name_of(signal: str, step: float, seed: int) -> str:
    """Return the name of a run, for its folder and the file of curves."""
    return f"{signal}-lr{step}-{seed}"


def train(
    study: str, steps: Sequence[float], seeds: Sequence[int], arguments: Arguments
) -> tuple[pd.DataFrame, dict[str, float]]:
    """Run what is missing of a study; return the curves with `signal`, `step`, `seed`, and each signal's best step."""
    runs: list[pd.DataFrame] = []

    def score(untried: Mapping[str, set[float]]) -> dict[str, dict[float, float]]:
        points = [(signal, step, seed) for seed in seeds for signal in untried for step in sorted(untried[signal])]
        names = pd.DataFrame(points, columns=["signal", "step", "seed"], index=[name_of(*point) for point in points])
        configs = {
            name: config_of(study, *point, arguments.into, arguments.overrides)
            for name, point in zip(names.index, points, strict=True)
        }
        curves = curves_of(configs, arguments, f"{study}.csv").join(names, on="run")
        runs.append(curves)
        means = percents(curves).groupby(["signal", "step"]).mean()
        return {signal: {step: float(means[signal, step]) for step in untried[signal]} for signal in untried}

    best = search(STUDIES[study], steps, score)
    return pd.concat(runs), best


def percents(curves: pd.DataFrame) -> pd.Series:
    """Return the models' average test accuracy after the last round, in %, by signal, step and seed."""
    return 100 * ends(curves).set_index(["signal", "step", "seed"]).test_accuracy.sort_index()


def table(study: str, curves: pd.DataFrame, best: Mapping[str, float]) -> pd.DataFrame:
    """Return the accuracies by step size, the gain over `uniform`, each at its best step, and the costs."""
    accuracies, rows = percents(curves), []
    last = ends(curves)
    costs = last[["bytes_up", "bytes_down", "trained"]].div(last.rounds, axis=0).groupby(last.signal).mean()
    for signal in STUDIES[study]:
        reached, top = accuracies[signal], accuracies[signal, best[signal]]
        gains = top - accuracies["uniform", best["uniform"]]
        of_steps = {
            f"step {step:g}": spread(reached[step]) if step in reached else NOTHING
            for step in sorted(curves.step.unique())
        }
        cost = costs.loc[signal]
        rows.append(
            {"signal": signal}
            | of_steps
            | {
                "best": f"{top.mean():.1f}",
                "minus uniform": NOTHING if signal == "uniform" else mean_and_error(gains),
                "MB up a round": f"{cost.bytes_up / 1e6:.2f}",
                "MB down": f"{cost.bytes_down / 1e6:.2f}",
                "trainings a round": f"{cost.trained:.0f}",
            }
        )
    return pd.DataFrame(rows)


def run(arguments: Arguments) -> None:
    """Run what is missing and write the summary."""
    seeds, picture = arguments.seeds or SEEDS, None
    text = ["# Several models at once"]
    for study in STUDIES:
        curves, best = train(study, STEPS, seeds, arguments)
        names = list(load_config(CONFIGS / f"{study}.yaml", arguments.overrides).tasks)
        text += [
            "",
            f"## {len(names)} models ({', '.join(names)})",
            "",
            f"{DATA[study]}. Average test accuracy in % after {curves.rounds.max()} rounds, mean ± sd of {len(seeds)} "
            "seeds; a difference ± its standard error.",
            "",
            frame_table(table(study, curves, best)),
        ]
        if study == "multi_task":
            top = curves[curves.step == curves.signal.map(best)].sort_values("signal", key=_order, kind="stable")
            top = top.assign(scheme=top.signal, megabytes_up=top.bytes_up / 1e6)
            picture = draw(top, {"rounds": "rounds", "megabytes sent by clients": "megabytes_up"}, PICTURE)
    write_summary(arguments, text, picture)


def _order(signals: pd.Series) -> pd.Series:
    return signals.map(STUDIES["multi_task"].index)
