"""What differential privacy costs each method, at the same ε: accuracy of dense, narrow and sharded training.

Noise grows with the numbers that clients train, and a shard has fewer. The hypothesis: at small ε sharding beats dense
training, and a narrow network of as many numbers is level with it.

The rules, set before the runs that are reported:

- Digits: 1200 clients of one or two samples each, 40 of them in a round by Poisson sampling, 40 rounds. CIFAR-10, with
  the network of the medium scale: 24,000 clients of two or three images, 100 in a round, 20 rounds. δ = 1e-5. Some runs
  of seed 0 (digits) or 1000 (CIFAR-10), of dense, narrow and top_n, chose the network's start, the rounds, and the two
  clipping norms and rates.
- Each method at ε = 2, 8 and 32 takes the noise multiplier that the account gives, the same for all, and the best of
  two clipping norms and two learning rates of the clients. Trials choose it: one run of a seed of its own, measured on
  training samples that no client has. Trials are not charged to ε.
- All methods have the server's optimizer and the average of models of the default recipe, and one local step, so that
  they differ in the model alone: `narrow` is the network whose numbers are nearest to a shard's of r = 0.1, on CIFAR-10
  of an even width. On digits, what the noise costs is the difference to the same training without it, clipped as with
  it.
- CIFAR-10, where time is short: `full` has no trials and takes what `dense` takes, as its trials on digits chose at
  every ε. A method whose trials all stay below 12 % at one ε is not run at a smaller one, where it has more noise.
- Reported is the accuracy of the last round on the test set, mean and deviation of three seeds, and the difference to
  `dense`, seed by seed. A difference counts if it is twice its standard error.

The seeds of the noise are given, so that the runs can be made again; real runs must not do so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from sharding.rounds.privacy.accountant import noise_for
from studies.curves import by_scheme, ends, evaluations, mean_and_error
from studies.runner import CONFIGS, Arguments, curves_of, folder, kept_curves, rounds_of, run_all, write_summary
from train.config.schema import Config, load_config
from train.report.plots import add_legend, styles_of
from train.report.text import NOTHING, frame_table, mean_and_spread
from train.run import run as train

COLUMNS = ("rounds", "bytes_up", "bytes_down", "test_accuracy")
DELTA = 1e-5
TRIAL_SEED, SEEDS = 1000, (0, 1, 2)
CHANCE = 0.12
BASELINE = "dense"
FULL_RANK = ("init=as_built",)  # a start of low rank has only the terms that top_n takes


@dataclass(frozen=True)
class Experiment:
    """What is compared on one dataset.

    Attributes:
        title: the data and the clients.
        config: the file of the configuration.
        narrow: overrides of the network with the numbers of a shard of r = 0.1.
        held_out: override that keeps training samples from the clients, for trials.
        epsilons: from the largest; infinite without noise.
        norms: two clipping norms.
        rates: two learning rates.
        same_choice: methods without trials of their own, and the method whose choice they take.
    """

    title: str
    config: Path
    narrow: Sequence[str]
    held_out: str
    epsilons: Sequence[float]
    norms: Sequence[float]
    rates: Sequence[float]
    same_choice: Mapping[str, str] = field(default_factory=dict)

    @property
    def methods(self) -> dict[str, Sequence[str]]:
        """The overrides of each method."""
        return {
            BASELINE: ("strategy=dense",),
            "narrow": ("strategy=dense", *self.narrow),
            "full": ("strategy=full",),
            "top_n 0.1": ("strategy=top_n",),
            "top_n 0.2": ("strategy=top_n", "keep_ratio=0.2"),
            "collective 0.1": ("strategy=collective", *FULL_RANK),
            "collective 0.2": ("strategy=collective", "keep_ratio=0.2", *FULL_RANK),
        }


EXPERIMENTS = {
    "privacy": Experiment(
        "digits, 1200 clients",
        CONFIGS / "privacy.yaml",
        narrow=("model={name: mlp, hidden: [73, 73, 73]}",),
        held_out="data.holdout=200",
        epsilons=(inf, 32.0, 8.0, 2.0),
        norms=(0.5, 1.5),
        rates=(0.3, 1.0),
    ),
    "privacy_cifar10": Experiment(
        "CIFAR-10, 24,000 clients",
        CONFIGS / "privacy_cifar10.yaml",
        narrow=("model.width=12", "model.groups=6"),
        held_out="data.holdout=2000",
        epsilons=(32.0, 8.0, 2.0),
        norms=(1.0, 3.0),
        rates=(0.3, 1.0),
        same_choice={"full": BASELINE},
    ),
}


def run(experiment: Experiment, arguments: Arguments) -> None:
    """Run the trials and the seeds that are missing, ε by ε from the largest; write the table and the picture.

    With a number of jobs, as many run at a time, in processes of their own.
    """
    chosen: dict[str, Point] = {}
    methods = [*experiment.methods]
    runs = run_here if arguments.jobs is None else run_all
    for epsilon in experiment.epsilons:
        tried = [method for method in methods if method not in experiment.same_choice]
        grid = [(each, epsilon, norm, lr) for each in tried for norm in experiment.norms for lr in experiment.rates]
        words = {named(*point[:2], point[2:]): [*words_of(experiment, point), experiment.held_out] for point in grid}
        configs = configs_of(experiment, words, replace(arguments, seeds=(TRIAL_SEED,)))
        trials = by_scheme(curves_of(configs, arguments, "trials.csv", columns=COLUMNS, run=runs))
        best = best_points(trials, grid)
        for method, other in experiment.same_choice.items():
            best[method] = (method, *best[other][0][1:]), best[other][1]
        points = {named(method, epsilon): best[method][0] for method in methods}
        words = {name: words_of(experiment, point) for name, point in points.items()}
        configs = configs_of(experiment, words, arguments)
        curves_of(configs, arguments, columns=COLUMNS, run=runs)
        chosen |= points
        methods = [method for method in methods if best[method][1] >= CHANCE]
    curves = by_scheme(kept_curves(arguments, columns=COLUMNS))
    config = load_config(experiment.config, ["strategy=dense"])
    setting = f"{config.clients.per_round} a round, {config.rounds} rounds, δ = 1e-5"
    remark = " ε = ∞ is the same training without noise." if inf in experiment.epsilons else ""
    lines = [f"# Differential privacy: {experiment.title}, {setting}", ""]
    lines += [frame_table(table(experiment, curves, chosen)), ""]
    lines += ["The last columns have what the trials chose." + remark]
    write_summary(arguments, lines, picture(experiment, curves))


Point = tuple[str, float, float, float]  # method, ε, clipping norm, rate


def best_points(trials: pd.DataFrame, points: Iterable[Point]) -> dict[str, tuple[Point, float]]:
    """Return the point of each method whose trial has the best accuracy, and that accuracy."""
    accuracy, best = ends(trials).set_index("scheme").test_accuracy, dict[str, tuple[Point, float]]()
    for point in points:
        method, found = point[0], float(accuracy[named(*point[:2], point[2:])])
        if method not in best or found > best[method][1]:
            best[method] = point, found
    return best


def words_of(experiment: Experiment, point: Point) -> list[str]:
    """Return the overrides of a point."""
    method, epsilon, norm, rate = point
    config = load_config(experiment.config, ["strategy=dense"])
    clients = config.clients
    z = noise_for(epsilon, clients.count, clients.per_round, config.rounds, DELTA) if epsilon < inf else 0
    return [
        *experiment.methods[method],
        f"local.optimizer.lr={rate}",
        f"privacy={{clipping_norm: {norm}, noise_multiplier: {z:.4f}, delta: {DELTA}}}",
    ]


def named(method: str, epsilon: float, rest: Iterable[float] = ()) -> str:
    """Return the name of a method at an ε, and of a trial at a clipping norm and a rate."""
    spent = "no noise" if epsilon == inf else f"ε={epsilon:g}"
    return ", ".join([method, spent, *(f"{value:g}" for value in rest)])


def configs_of(experiment: Experiment, schemes: Mapping[str, Sequence[str]], arguments: Arguments) -> dict[str, Config]:
    """Return the configuration of every seed of every scheme, with known noise."""
    configs = {}
    for scheme, words in schemes.items():
        for seed in arguments.seeds or SEEDS:
            seeds = [f"seed={seed}", f"privacy.secret_seed={seed}"]
            overrides = [*words, *seeds, f"output={arguments.into}/runs/{folder(scheme)}-{seed}", *arguments.overrides]
            configs[f"{scheme}-{seed}"] = load_config(experiment.config, overrides)
    return configs


def run_here(configs: Mapping[str, Config], *_: object) -> pd.DataFrame:
    """Run what is missing, one after the other in this process.

    On digits a run takes seconds, and a process as long to start.
    """
    for name, config in configs.items():
        train(config, resume=True)
        print(name, flush=True)
    return evaluations(rounds_of(configs))


def table(experiment: Experiment, curves: pd.DataFrame, settings: Mapping[str, Point]) -> pd.DataFrame:
    """Return a row for each method at each ε: its accuracy in %, the difference to `dense`, and the chosen point."""
    last, rows = ends(curves), []
    for epsilon in sorted(experiment.epsilons):
        baseline = _accuracies(last, named(BASELINE, epsilon))
        for method in experiment.methods:
            if (name := named(method, epsilon)) not in settings:
                continue
            found, (_, _, norm, rate) = _accuracies(last, name), settings[name]
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


def picture(experiment: Experiment, curves: pd.DataFrame) -> Figure:
    """Draw the accuracy of each method against ε, with a bar of one deviation, and without noise at the right."""
    last, epsilons = ends(curves), sorted(experiment.epsilons)
    places = [*range(len(epsilons))]
    figure = Figure(figsize=(6, 4), layout="constrained")
    figure.suptitle(f"Accuracy at the same privacy: {experiment.title}", x=0.01, ha="left")
    axes = figure.subplots()
    for method, style in styles_of([*experiment.methods]).items():
        found = [_accuracies(last, named(method, epsilon)) for epsilon in epsilons]
        means, bars = [each.mean() for each in found], [each.std() for each in found]
        axes.errorbar(places, means, bars, capsize=3, label=method, **style.line(len(places)))
    axes.set_xticks(places, ["no noise" if epsilon == inf else f"ε = {epsilon:g}" for epsilon in epsilons])
    axes.set(ylabel="test accuracy (%)")
    axes.grid(alpha=0.3)
    add_legend(figure, axes)
    return figure


def _accuracies(last: pd.DataFrame, scheme: str) -> pd.Series:
    return 100 * last[last.scheme == scheme].set_index("seed").test_accuracy
