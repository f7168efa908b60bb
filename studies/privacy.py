"""What differential privacy costs each method, at the same ε: accuracy of dense, narrow and sharded training.

Noise grows with the numbers that clients train, and a shard has fewer. The hypothesis: at small ε sharding beats dense
training, and a narrow network of as many numbers is level with it.

The rules, set before the runs that are reported:

- Digits, 1200 clients of one or two samples each, 40 of them in a round by Poisson sampling, 40 rounds, δ = 1e-5. Some
  runs of seed 0, of dense, narrow and top_n, chose the network, the rounds and the two clipping norms and rates.
- Each method at ε = 2, 8 and 32 takes the noise multiplier that the account gives, the same for all, and the best of
  two clipping norms and two learning rates of the clients. Trials choose it: one run of a seed of its own, measured on
  200 training samples that no client has. Trials are not charged to ε.
- All methods have the server's optimizer and the average of models of the default recipe, and one local step, so that
  they differ in the model alone: `narrow` is a network of 73 instead of 128 units a layer, which has the numbers of a
  shard of r = 0.1. What the noise costs is the difference to the same training without it, clipped as with it.
- Reported is the accuracy of the last round on the test set, mean and deviation of three seeds, and the difference to
  `dense`, seed by seed. A difference counts if it is twice its standard error.

The seeds of the noise are given, so that the runs can be made again; real runs must not do so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

import pandas as pd
from matplotlib.figure import Figure

from sharding.rounds.privacy.accountant import noise_for
from studies.curves import by_scheme, ends, evaluations, mean_and_error
from studies.runner import CONFIGS, Arguments, curves_of, folder, kept_curves, rounds_of, write_summary
from train.config.schema import Config, load_config
from train.report.plots import add_legend, styles_of
from train.report.text import NOTHING, frame_table, mean_and_spread
from train.run import run as train

COLUMNS = ("rounds", "bytes_up", "bytes_down", "test_accuracy")
DELTA, EPSILONS = 1e-5, (2.0, 8.0, 32.0, inf)  # infinite: without noise
NORMS, RATES = (0.5, 1.5), (0.3, 1.0)
TRIAL_SEED, SEEDS = 1000, (0, 1, 2)
HELD_OUT = "data.holdout=200"
BASELINE = "dense"
FULL_RANK = ("init=as_built",)  # a start of low rank has only the terms that top_n takes
METHODS: dict[str, Sequence[str]] = {
    BASELINE: ("strategy=dense",),
    "narrow": ("strategy=dense", "model={name: mlp, hidden: [73, 73, 73]}"),
    "full": ("strategy=full",),
    "top_n 0.1": ("strategy=top_n",),
    "top_n 0.2": ("strategy=top_n", "keep_ratio=0.2"),
    "collective 0.1": ("strategy=collective", *FULL_RANK),
    "collective 0.2": ("strategy=collective", "keep_ratio=0.2", *FULL_RANK),
}


def run(arguments: Arguments) -> None:
    """Run the trials and the seeds that are missing, ε by ε; write the table and the picture."""
    chosen: dict[str, Point] = {}
    for epsilon in EPSILONS:
        trials = {named(*point[:2], point[2:]): [*words_of(point), HELD_OUT] for point in points(epsilon)}
        configs = configs_of(trials, replace(arguments, seeds=(TRIAL_SEED,)))
        best = best_points(by_scheme(curves_of(configs, arguments, "trials.csv", columns=COLUMNS, run=run_here)))
        configs = configs_of({name: words_of(point) for name, point in best.items()}, arguments)
        curves_of(configs, arguments, columns=COLUMNS, run=run_here)
        chosen |= best
    curves = by_scheme(kept_curves(arguments, columns=COLUMNS))
    lines = ["# Differential privacy: digits, 1200 clients, 40 a round, 40 rounds, δ = 1e-5", ""]
    lines += [frame_table(table(curves, chosen)), ""]
    lines += ["The last columns have what the trials chose. ε = ∞ is the same training without noise."]
    write_summary(arguments, lines, picture(curves))


Point = tuple[str, float, float, float]  # method, ε, clipping norm, rate


def points(epsilon: float) -> list[Point]:
    """Return what trials compare at an ε."""
    return [(method, epsilon, norm, rate) for method in METHODS for norm in NORMS for rate in RATES]


def best_points(trials: pd.DataFrame) -> dict[str, Point]:
    """Return the point of each method and ε whose trial has the best accuracy, by the names of the methods' runs."""
    accuracy, best = ends(trials).set_index("scheme").test_accuracy, dict[str, tuple[float, Point]]()
    for point in (point for epsilon in EPSILONS for point in points(epsilon)):
        name, trial = named(*point[:2]), named(*point[:2], point[2:])
        if trial in accuracy and (name not in best or accuracy[trial] > best[name][0]):
            best[name] = float(accuracy[trial]), point
    return {name: point for name, (_, point) in best.items()}


def words_of(point: Point) -> list[str]:
    """Return the overrides of a point."""
    method, epsilon, norm, rate = point
    config = load_config(CONFIGS / "privacy.yaml", ["strategy=dense"])
    clients = config.clients
    z = noise_for(epsilon, clients.count, clients.per_round, config.rounds, DELTA) if epsilon < inf else 0
    return [
        *METHODS[method],
        f"local.optimizer.lr={rate}",
        f"privacy={{clipping_norm: {norm}, noise_multiplier: {z:.4f}, delta: {DELTA}}}",
    ]


def named(method: str, epsilon: float, rest: Iterable[float] = ()) -> str:
    """Return the name of a method at an ε, and of a trial at a clipping norm and a rate."""
    spent = "no noise" if epsilon == inf else f"ε={epsilon:g}"
    return ", ".join([method, spent, *(f"{value:g}" for value in rest)])


def configs_of(schemes: Mapping[str, Sequence[str]], arguments: Arguments) -> dict[str, Config]:
    """Return the configuration of every seed of every scheme, with known noise."""
    configs = {}
    for scheme, words in schemes.items():
        for seed in arguments.seeds or SEEDS:
            seeds = [f"seed={seed}", f"privacy.secret_seed={seed}"]
            overrides = [*words, *seeds, f"output={arguments.into}/runs/{folder(scheme)}-{seed}", *arguments.overrides]
            configs[f"{scheme}-{seed}"] = load_config(CONFIGS / "privacy.yaml", overrides)
    return configs


def run_here(configs: Mapping[str, Config], *_: object) -> pd.DataFrame:
    """Run what is missing, one after the other in this process: a run takes seconds, and starting one as long."""
    for name, config in configs.items():
        train(config, resume=True)
        print(name, flush=True)
    return evaluations(rounds_of(configs))


def table(curves: pd.DataFrame, settings: Mapping[str, Point]) -> pd.DataFrame:
    """Return a row for each method at each ε: its accuracy in %, the difference to `dense`, and the chosen point."""
    last, rows = ends(curves), []
    for epsilon in EPSILONS:
        baseline = _accuracies(last, named(BASELINE, epsilon))
        for method in METHODS:
            found, (_, _, norm, rate) = _accuracies(last, named(method, epsilon)), settings[named(method, epsilon)]
            rows.append(
                {
                    "ε": "∞" if epsilon == inf else f"{epsilon:g}",
                    "method": method,
                    "accuracy": mean_and_spread(found),
                    f"minus {BASELINE}": NOTHING if method == BASELINE else mean_and_error((found - baseline).dropna()),
                    "norm": f"{norm:g}",
                    "lr": f"{rate:g}",
                }
            )
    return pd.DataFrame(rows)


def picture(curves: pd.DataFrame) -> Figure:
    """Draw the accuracy of each method against ε, with a bar of one deviation, and without noise at the right."""
    last, places = ends(curves), [*range(len(EPSILONS))]
    figure = Figure(figsize=(6, 4), layout="constrained")
    figure.suptitle("Accuracy at the same privacy: digits, 1200 clients", x=0.01, ha="left")
    axes = figure.subplots()
    for method, style in styles_of([*METHODS]).items():
        found = [_accuracies(last, named(method, epsilon)) for epsilon in EPSILONS]
        means, bars = [each.mean() for each in found], [each.std() for each in found]
        axes.errorbar(places, means, bars, capsize=3, label=method, **style.line(len(places)))
    axes.set_xticks(places, ["no noise" if epsilon == inf else f"ε = {epsilon:g}" for epsilon in EPSILONS])
    axes.set(ylabel="test accuracy (%)")
    axes.grid(alpha=0.3)
    add_legend(figure, axes)
    return figure


def _accuracies(last: pd.DataFrame, scheme: str) -> pd.Series:
    return 100 * last[last.scheme == scheme].set_index("seed").test_accuracy
