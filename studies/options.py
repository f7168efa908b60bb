"""What each of our training options is worth: alone and left out, each at its own best learning rate.

An arm is a set of options. Trials on a seed of their own compare three rates; then the arm trains at the best of them
on the seeds that are reported. `result=average` changes only the model that is evaluated, so one run has the accuracy
of the average and of the last model.

- `options`: CIFAR-10 at the medium scale of the paper's column (configs/beyond.yaml), r = 0.1.
- `options_shakespeare`: all options with the default strategy, on a transformer of the published width, r = 0.1.
- `uneven`: strategies, and smaller models, for the paper's uneven clients, r of 0.2 and 0.4, on the same bytes.
- `capacity`: the default with ever more strong clients, at equal rounds and at equal bytes.
- `central`: the models of `capacity` and `uneven`, trained on all samples without a federation, for as many steps as
  the cohorts of 200 rounds take.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from sharding import UserError
from studies import beyond, width
from studies.beyond import AVERAGE, LOW_RANK, NESTEROV, course, difference, format_percents
from studies.curves import by_scheme, ends
from studies.picture import draw
from studies.runner import CONFIGS, Arguments, configs_of, curves_of, kept_curves, run_all, write_summary
from train.config.schema import Config, load_config
from train.experiment.assembly import assemble
from train.experiment.evaluation import evaluate
from train.report.text import frame_table
from train.rundir.checkpoint import find_checkpoint

# Of a curve: the accuracy is the average's where a run has one, and at its end there is the last model's too.
COLUMNS = ("rounds", "bytes_up", "bytes_down", "test_accuracy", "last_accuracy")
TRIAL_SEED, SEEDS = 1000, (0, 1, 2)
TUNED = (*LOW_RANK, *NESTEROV, *AVERAGE)
WITHOUT_TAIL = ("strategy=top_n", *TUNED)
ALL_OPTIONS = (*WITHOUT_TAIL, "tail=int4")
UNEVEN = beyond.Benchmark(
    "beyond",
    "CIFAR-10 (re-encoded), medium scale, r = 0.2 and 0.4",
    ("keep_ratio={0.2: 0.6, 0.4: 0.4}", "rounds=200"),
)
NARROW = beyond.narrow_network(14)  # no larger than a shard of r = 0.2
SMALL_RATES = (0.01, 0.02, 0.03)
CENTRAL_RATES = (0.02, 0.05, 0.1)
LOW_RATES, MIDDLE_RATES, HIGH_RATES = (0.02, 0.03, 0.05), (0.03, 0.05, 0.1), (0.05, 0.1, 0.2)


Run = Callable[..., pd.DataFrame]


class OptionSet(NamedTuple):
    """A set of options, and the rates to try.

    Attributes:
        overrides: of the experiment.
        rates: values of `local.optimizer.lr`; one needs no trial.
        run: trains its configurations, as `run_all` does.
    """

    overrides: Sequence[str]
    rates: Sequence[float]
    run: Run = run_all


class OptionStudy(NamedTuple):
    """Arms that are compared on the same data.

    Attributes:
        on: data and model.
        trial: the share of the rounds that a trial has.
        arms: by name; differences are to the first.
    """

    on: beyond.Benchmark
    trial: float
    arms: Mapping[str, OptionSet]


def default_at(keep_ratio: str, rounds: int) -> OptionSet:
    """Return the default with these keep ratios, at the rate that trials chose for it."""
    return OptionSet((*ALL_OPTIONS, f"keep_ratio={keep_ratio}", f"rounds={rounds}"), (0.02,))


EXPERIMENTS = {
    "options": OptionStudy(
        beyond.EXPERIMENTS["beyond"],
        1 / 4,
        {
            "low_rank, nesterov": OptionSet(TUNED, LOW_RATES),
            "low_rank": OptionSet((*LOW_RANK, *AVERAGE), LOW_RATES),
            "nesterov": OptionSet((*NESTEROV, *AVERAGE), HIGH_RATES),
            "published": OptionSet(AVERAGE, HIGH_RATES),
            "top_n, low_rank, nesterov": OptionSet(ALL_OPTIONS, LOW_RATES),
        },
    ),
    "options_shakespeare": OptionStudy(
        beyond.EXPERIMENTS["beyond_shakespeare"],
        1 / 2,
        {"top_n, low_rank, nesterov": OptionSet(ALL_OPTIONS, MIDDLE_RATES)},
    ),
    "uneven": OptionStudy(
        UNEVEN,
        1 / 4,
        {
            "top_n": OptionSet(WITHOUT_TAIL, LOW_RATES),
            "top_n, tail": OptionSet((*ALL_OPTIONS, "rounds=195"), SMALL_RATES),  # the tail's bytes are five rounds
            "collective": OptionSet(TUNED, LOW_RATES),
            "unbiased": OptionSet(("strategy=unbiased", *TUNED), LOW_RATES),
            "narrow": OptionSet((*NARROW, "rounds=347", *NESTEROV, *AVERAGE), MIDDLE_RATES),
            "HeteroFL": OptionSet(("rounds=245", *NESTEROV), MIDDLE_RATES, partial(width.run_all, "nested")),
            "FedRolex": OptionSet(("rounds=245", *NESTEROV), MIDDLE_RATES, partial(width.run_all, "rolling")),
        },
    ),
    "capacity": OptionStudy(
        UNEVEN,
        1 / 4,
        {
            "r = 0.2 for all": default_at("0.2", 200),
            "20 % at 0.4": default_at("{0.2: 0.8, 0.4: 0.2}", 200),
            "40 % at 0.4": default_at("{0.2: 0.6, 0.4: 0.4}", 200),
            "100 % at 0.4": default_at("0.4", 200),
            "r = 0.2 for all, equal bytes": default_at("0.2", 278),  # as many as 195 rounds with 40 % at 0.4
            "20 % at 0.4, equal bytes": default_at("{0.2: 0.8, 0.4: 0.2}", 223),
            "40 % at 0.4, equal bytes": default_at("{0.2: 0.6, 0.4: 0.4}", 195),
            "100 % at 0.4, equal bytes": default_at("0.4", 142),
        },
    ),
    "central": OptionStudy(
        beyond.Benchmark(
            "beyond",
            "CIFAR-10 (re-encoded), one client with all samples",
            ("clients={count: 1, per_round: 1}", "local.steps=160", "rounds=200"),  # 10 clients take 16 steps each
        ),
        1 / 10,
        {
            "r = 0.2": OptionSet(("strategy=top_n", *LOW_RANK, "keep_ratio=0.2"), CENTRAL_RATES),
            "r = 0.4": OptionSet(("strategy=top_n", *LOW_RANK, "keep_ratio=0.4"), CENTRAL_RATES),
            "narrow": OptionSet(NARROW, CENTRAL_RATES),
            "whole": OptionSet(("strategy=dense",), CENTRAL_RATES),
        },
    ),
}


def run(experiment: OptionStudy, arguments: Arguments) -> None:
    """Run what is missing of these arms, and write a table of all arms that have runs."""
    arms = arms_of(experiment, arguments)
    rates = {name: arm.rates for name, arm in arms.items() if len(arm.rates) > 1}
    train(experiment, arguments, "rates.csv", rates, (TRIAL_SEED,), experiment.trial)
    trials = by_scheme(kept_curves(arguments, "rates.csv", COLUMNS))
    best = {name: [best_rate(name, arm, trials) if name in rates else arm.rates[0]] for name, arm in arms.items()}
    train(experiment, arguments, "curves.csv", best, arguments.seeds or SEEDS)
    curves = by_scheme(kept_curves(arguments, columns=COLUMNS))
    text = [f"# Each at its own rate: {experiment.on.title}", ""]
    if len(trials):
        text += ["## Trials of rates", "", frame_table(rates_table(trials)), ""]
    text += ["## At the best rate", "", frame_table(arms_table(curves, next(iter(experiment.arms))))]
    curves = curves.assign(gigabytes=curves.bytes_total / 1e9)
    write_summary(arguments, text, draw(curves, {"GB down and up": "gigabytes"}, experiment.on.title))


def arms_of(experiment: OptionStudy, arguments: Arguments) -> dict[str, OptionSet]:
    """Return the arms to run.

    Raises:
        UserError: there is no arm of a name.
    """
    if unknown := set(arguments.only or ()) - set(experiment.arms):
        raise UserError(f"--only: {', '.join(sorted(unknown))} is not among {', '.join(experiment.arms)}")
    return {name: arm for name, arm in experiment.arms.items() if arguments.only is None or name in arguments.only}


def train(
    experiment: OptionStudy,
    arguments: Arguments,
    file: str,
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    share: float = 1.0,
) -> None:
    """Train arms at these rates on these seeds for a share of their rounds, unless the file of curves has them."""
    runs = {arm.run: None for arm in experiment.arms.values()}
    for run in runs:
        schemes = {
            title(name, rate): overrides_of(
                experiment, arm, share, [*arguments.overrides, f"local.optimizer.lr={rate}"]
            )
            for name, arm in experiment.arms.items()
            for rate in rates.get(name, ())
            if arm.run is run
        }
        configs = configs_of(CONFIGS / f"{experiment.on.config}.yaml", schemes, seeds, arguments.into)
        curves_of(configs, arguments, file, columns=COLUMNS, run=partial(run_with_last, run))


def title(name: str, rate: float) -> str:
    """Return the name of an arm at a rate."""
    return f"{name}, lr {rate}"


def overrides_of(experiment: OptionStudy, arm: OptionSet, share: float, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of an arm for a share of its rounds, with further ones."""
    overrides = [*experiment.on.overrides, *arm.overrides, *overrides]
    rounds = load_config(CONFIGS / f"{experiment.on.config}.yaml", overrides).rounds
    return [*overrides, f"rounds={round(rounds * share)}"]


def run_with_last(
    run: Run, configs: Mapping[str, Config], jobs: int | None = None, diverging: bool = False
) -> pd.DataFrame:
    """Run what is missing, and add the last model's accuracy to the end of each curve."""
    curves = run(configs, jobs, diverging)
    last = ends(curves).set_index("run").test_accuracy
    last.update({name: last_accuracy(config) for name, config in configs.items() if config.result != "last"})
    return curves.assign(last_accuracy=curves.run.map(last).where(curves.index.isin(ends(curves).index)))


def last_accuracy(config: Config) -> float:
    """Return the test accuracy of a finished run's last model, which its checkpoint holds."""
    experiment = assemble(config)
    checkpoint = find_checkpoint(config.directory, config.rounds)
    assert checkpoint is not None
    checkpoint[1].restore(experiment.model)
    return evaluate(experiment.model, experiment.dataset, experiment.dataset.test)[0]


def best_rate(name: str, arm: OptionSet, trials: pd.DataFrame) -> float:
    """Return the rate whose trial ends with the highest accuracy."""
    accuracies = ends(trials).set_index("scheme").test_accuracy
    return max(arm.rates, key=lambda rate: accuracies[title(name, rate)])


def rates_table(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the course of every trial."""
    rows = [{"options": name} | course(runs) | _last_model(runs) for name, runs in trials.groupby("scheme", sort=False)]
    return pd.DataFrame(rows).drop(columns=["rounds", "GB", "seeds"], errors="ignore")


def arms_table(curves: pd.DataFrame, first: str) -> pd.DataFrame:
    """Return the course of every arm at its best rate, the mean over seeds, and the difference to the first arm."""
    base, rows = curves[curves.scheme.str.rpartition(", lr ")[0] == first], []
    for name, runs in curves.groupby("scheme", sort=False):
        gain = {"end minus the first": difference(runs, base)}
        rows.append({"options": name} | course(runs, ".2f") | _last_model(runs) | gain)
    return pd.DataFrame(rows)


def _last_model(runs: pd.DataFrame) -> dict[str, str]:
    return {"end, last model": format_percents(100 * ends(runs).last_accuracy)}
