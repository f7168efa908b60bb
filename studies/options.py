"""What each of our training options is worth: alone and left out, each at its own best learning rate.

An arm is a set of options. Trials on a seed of their own compare three rates; then the arm trains at the best of them
on the seeds that are reported. `result=average` changes only the model that is evaluated, so one run has the accuracy
of the average and of the last model.

- `options`: CIFAR-10 at the medium scale of the paper's column (configs/beyond.yaml), r = 0.1.
- `options_shakespeare`: all options with the default strategy, on a transformer of the published width, r = 0.1.
- `uneven`: strategies, and smaller models, for the paper's uneven clients, r of 0.2 and 0.4, on the same bytes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import nan
from typing import NamedTuple, Self

from sharding.errors import UserError
from studies import beyond, width
from studies.beyond import AVERAGE, LOW_RANK, NESTEROV, PARTS, accuracy_near, course, shown
from studies.curves import Evaluation, Lines, by_seed, gigabytes
from studies.picture import draw
from studies.runner import CONFIGS, Arguments, cells, curves_of, kept_curves, run_all, write_summary
from train.assembly import assemble
from train.config.schema import Config, load_config
from train.engines.local import evaluate
from train.report.text import markdown_table
from train.rundir.checkpoint import find_checkpoint

TRIAL_SEED, SEEDS = 1000, (0, 1, 2)
TUNED = (*LOW_RANK, *NESTEROV, *AVERAGE)
UNEVEN = beyond.Experiment(
    "beyond",
    "CIFAR-10 (re-encoded), medium scale, r = 0.2 and 0.4",
    ("keep_ratio={0.2: 0.6, 0.4: 0.4}", "rounds=200"),
)
NARROW = ("strategy=dense", "model.width=14", "model.groups=7", "rounds=347")  # as many bytes in all
HEAD = (*(f"{100 * part:.0f} %" for part in PARTS[:-1]), "end", "end, last model")
LOW_RATES, MIDDLE_RATES, HIGH_RATES = (0.02, 0.03, 0.05), (0.03, 0.05, 0.1), (0.05, 0.1, 0.2)


class Arm(NamedTuple):
    """A set of options, and the three rates to try.

    Attributes:
        words: overrides of the experiment.
        rates: values of `local.lr`.
        windows: whether it trains windows of channels (`studies/width.py`), as HeteroFL does.
    """

    words: Sequence[str]
    rates: Sequence[float]
    windows: bool = False


class Experiment(NamedTuple):
    """Arms that are compared on the same data.

    Attributes:
        on: data and model.
        trial: the share of the rounds that a trial has.
        arms: by name; differences are to the first.
    """

    on: beyond.Experiment
    trial: float
    arms: Mapping[str, Arm]


class Point(NamedTuple):
    """An evaluation: of the average, and at the end of the last model. A number that does not exist is NaN."""

    rounds: int
    bytes_up: int
    bytes_down: int
    test_accuracy: float
    last_accuracy: float = nan

    @classmethod
    def of_run(cls, lines: Lines) -> list[Self]:
        """Return every evaluation of a run."""
        found = [cls(at.rounds, at.bytes_up, at.bytes_down, at.test_accuracy) for at in Evaluation.of_run(lines)]
        return [*found[:-1], found[-1]._replace(last_accuracy=lines[-1].get("last_accuracy", found[-1].test_accuracy))]


Runs = Mapping[str, Mapping[int, Sequence[Point]]]  # by title and seed


EXPERIMENTS = {
    "options": Experiment(
        beyond.EXPERIMENTS["beyond"],
        1 / 4,
        {
            "low_rank, nesterov": Arm(TUNED, LOW_RATES),
            "low_rank": Arm((*LOW_RANK, *AVERAGE), LOW_RATES),
            "nesterov": Arm((*NESTEROV, *AVERAGE), HIGH_RATES),
            "published": Arm(AVERAGE, HIGH_RATES),
            "top_n, low_rank, nesterov": Arm(("strategy=top_n", *TUNED), LOW_RATES),
        },
    ),
    "options_shakespeare": Experiment(
        beyond.EXPERIMENTS["beyond_shakespeare"],
        1 / 2,
        {"top_n, low_rank, nesterov": Arm(("strategy=top_n", *TUNED), MIDDLE_RATES)},
    ),
    "uneven": Experiment(
        UNEVEN,
        1 / 4,
        {
            "top_n": Arm(("strategy=top_n", *TUNED), LOW_RATES),
            "collective": Arm(TUNED, LOW_RATES),
            "unbiased": Arm(("strategy=unbiased", *TUNED), LOW_RATES),
            "narrow": Arm((*NARROW, *NESTEROV, *AVERAGE), MIDDLE_RATES),
            "HeteroFL": Arm(("rounds=245", *NESTEROV), MIDDLE_RATES, windows=True),
        },
    ),
}


def run(its: Experiment, arguments: Arguments) -> None:
    """Run what is missing of these arms, and write a table of all arms that have runs."""
    arms = {name: arm for name, arm in its.arms.items() if arguments.only is None or name in arguments.only}
    if strange := set(arguments.only or ()) - set(its.arms):
        raise UserError(f"--only: {', '.join(sorted(strange))} is not among {', '.join(its.arms)}")
    train(its, arguments, "rates.csv", {name: arm.rates for name, arm in arms.items()}, (TRIAL_SEED,), its.trial)
    tried = by_seed(kept_curves(arguments, "rates.csv", Point))
    best = {name: [best_rate(name, arm, tried)] for name, arm in arms.items()}
    train(its, arguments, "curves.csv", best, arguments.seeds or SEEDS)
    text = [f"# Each at its own rate: {its.on.title}", "", "## Trials of rates", "", rates_table(tried)]
    runs = by_seed(kept_curves(arguments, kind=Point))
    text += ["", "## At the best rate", "", arms_table(runs, next(iter(its.arms)))]
    curves = {name: list(seeds.values()) for name, seeds in runs.items()}
    write_summary(arguments, text, draw(curves, {"GB down and up": gigabytes}, its.on.title))


def train(
    its: Experiment,
    arguments: Arguments,
    kept: str,
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    share: float = 1.0,
) -> None:
    """Train arms at these rates on these seeds for a share of their rounds, unless the file of curves has them."""
    for run, windows in ((run_with_last, False), (partial(width.run_all, "nested"), True)):
        words = {
            title(name, rate): words_of(its, its.arms[name], share, [*arguments.overrides, f"local.lr={rate}"])
            for name in rates
            for rate in rates[name]
            if its.arms[name].windows == windows
        }
        configs = cells(CONFIGS / f"{its.on.config}.yaml", words, seeds, arguments.into)
        curves_of(configs, arguments, kept, kind=Point, run=run)


def title(name: str, rate: float) -> str:
    """Return the name of an arm at a rate."""
    return f"{name}, lr {rate}"


def words_of(its: Experiment, arm: Arm, share: float, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of an arm for a share of its rounds."""
    words = [*its.on.words, *arm.words, *overrides]
    rounds = load_config(CONFIGS / f"{its.on.config}.yaml", words).rounds
    return [*words, f"rounds={round(rounds * share)}"]


def run_with_last(configs: Mapping[str, Config], jobs: int | None, diverging: bool) -> dict[str, Lines]:
    """Run what is missing, and add the last model's accuracy to the last line of each run."""
    found = run_all(configs, jobs, diverging)
    return {
        name: [*lines[:-1], {**lines[-1], "last_accuracy": last_accuracy(configs[name])}]
        for name, lines in found.items()
    }


def last_accuracy(config: Config) -> float:
    """Return the test accuracy of a finished run's last model, which its checkpoint holds."""
    experiment = assemble(config)
    checkpoint = find_checkpoint(config.directory, config.rounds)
    assert checkpoint is not None
    checkpoint[1].restore(experiment.model)
    return evaluate(experiment.model, experiment.dataset, experiment.dataset.test)[0]


def best_rate(name: str, arm: Arm, tried: Runs) -> float:
    """Return the rate whose trial ends with the highest accuracy."""
    return max(arm.rates, key=lambda rate: tried[title(name, rate)][TRIAL_SEED][-1].test_accuracy)


def rates_table(tried: Runs) -> str:
    """Return the course of every trial."""
    rows = [
        [name, *(shown([accuracy_near(run, part)]) for part in PARTS), shown([100 * run[-1].last_accuracy])]
        for name, seeds in tried.items()
        for run in seeds.values()
    ]
    return markdown_table(("options", *HEAD), rows)


def arms_table(runs: Runs, first: str) -> str:
    """Return the course of every arm at its best rate, the mean over seeds, and the difference to the first arm."""
    base, rows = next((run for name, run in runs.items() if name.rpartition(", lr ")[0] == first), {}), []
    for name, seeds in runs.items():
        last = [100 * run[-1].last_accuracy for run in seeds.values()]
        rows.append(course(name, seeds, last, base, ".2f"))
    return markdown_table(("options", "rounds", "GB", "seeds", *HEAD, "end minus the first"), rows)
