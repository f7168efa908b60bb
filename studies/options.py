"""What each of our training options is worth: alone and left out, each at its own best learning rate.

An arm is a set of options. Trials on a seed of their own compare three rates; then the arm trains at the best of them
on the seeds that are reported. `result=average` changes only the model that is evaluated, so one run has the accuracy
of the average and of the last model.

- `options`: CIFAR-10 at the medium scale of the paper's column (configs/beyond.yaml), r = 0.1.
- `uneven`: strategies, and smaller models, for the paper's uneven clients, r of 0.2 and 0.4, on the same bytes.
"""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import NamedTuple

from sharding.errors import UserError
from studies.beyond import EXPERIMENTS as BEYOND
from studies.beyond import NESTEROV, accuracy_near, difference, run_windows
from studies.curves import Lines, by_seed, curve
from studies.runner import CONFIGS, Arguments, curves_of, folder, kept_curves, run_all, write_summary
from train.assembly import assemble
from train.config.schema import Config, load_config
from train.engines.local import evaluate
from train.report.text import NOTHING, markdown_table, mean_and_spread
from train.rundir.checkpoint import find_checkpoint

TRIAL_SEED, SEEDS = 1000, (0, 1, 2)
AVERAGE, LOW_RANK = ("result=average",), ("init=low_rank",)
TUNED = (*LOW_RANK, *NESTEROV, *AVERAGE)
UNEVEN = BEYOND["beyond_uneven"]
PARTS = (0.25, 0.5, 0.75, 1.0)  # of a run
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
        title: of the table.
        config: its file in configs/.
        words: overrides of that file.
        trial: the share of the rounds that a trial has.
        arms: by name; differences are to the first.
    """

    title: str
    config: str
    words: Sequence[str]
    trial: float
    arms: Mapping[str, Arm]


class Point(NamedTuple):
    """An evaluation: of the average, and at the end of the last model. A number that does not exist is NaN."""

    rounds: int
    bytes_up: int
    bytes_down: int
    test_accuracy: float
    last_accuracy: float = nan


EXPERIMENTS = {
    "options": Experiment(
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.1",
        "beyond",
        (),
        1 / 4,
        {
            "low_rank, nesterov": Arm(TUNED, LOW_RATES),
            "low_rank": Arm((*LOW_RANK, *AVERAGE), LOW_RATES),
            "nesterov": Arm((*NESTEROV, *AVERAGE), MIDDLE_RATES),
            "published": Arm(AVERAGE, HIGH_RATES),
        },
    ),
    "uneven": Experiment(
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.2 of 60 % of the clients and 0.4 of 40 %",
        "beyond",
        UNEVEN.words,
        1 / 4,
        {
            "top_n": Arm(("strategy=top_n", *TUNED), LOW_RATES),
            "collective": Arm(TUNED, LOW_RATES),
            "unbiased": Arm(("strategy=unbiased", *TUNED), LOW_RATES),
            "narrow": Arm(("strategy=dense", *UNEVEN.equal["narrow"], *NESTEROV, *AVERAGE), MIDDLE_RATES),
            "HeteroFL": Arm((*UNEVEN.equal["width, nested"], *NESTEROV), MIDDLE_RATES, windows=True),
        },
    ),
}


def run(its: Experiment, arguments: Arguments) -> None:
    """Run what is missing of these arms, and write a table of all arms that have runs."""
    arms = {name: arm for name, arm in its.arms.items() if arguments.only is None or name in arguments.only}
    if strange := set(arguments.only or ()) - set(its.arms):
        raise UserError(f"--only: {', '.join(sorted(strange))} is not among {', '.join(its.arms)}")
    train(its, arguments, "rates", [(name, rate, TRIAL_SEED) for name, arm in arms.items() for rate in arm.rates])
    tried = known(arguments, "rates")
    best = {name: best_rate(name, arm, tried) for name, arm in arms.items()}
    train(its, arguments, "curves", [(name, best[name], seed) for seed in arguments.seeds or SEEDS for name in arms])
    text = [f"# Each at its own rate: {its.title}", "", "## Trials of rates", "", rates_table(tried)]
    text += ["", "## At the best rate", "", arms_table(known(arguments, "curves"))]
    write_summary(arguments, text)


def train(its: Experiment, arguments: Arguments, kept: str, wanted: Sequence[tuple[str, float, int]]) -> None:
    """Train these arms at these rates on these seeds, unless the file of curves has them."""
    share = its.trial if kept == "rates" else 1.0
    runs = {f"{title(name, rate)}-{seed}": (its.arms[name], rate, seed) for name, rate, seed in wanted}
    for windows in (False, True):
        configs = {
            name: config_of(
                its, arm, share, [*arguments.overrides, f"local.lr={rate}", f"seed={seed}", where(arguments, name)]
            )
            for name, (arm, rate, seed) in runs.items()
            if arm.windows == windows
        }
        run = run_windows if windows else run_with_last
        curves_of(
            configs,
            arguments.into / f"{kept}.csv",
            arguments.overrides,
            arguments.jobs,
            measure=points,
            kind=Point,
            run=run,
        )


def title(name: str, rate: float) -> str:
    """Return the name of an arm at a rate."""
    return f"{name}, lr {rate}"


def where(arguments: Arguments, name: str) -> str:
    """Return the override that gives a run its folder."""
    return f"output={arguments.into}/runs/{folder(name)}"


def config_of(its: Experiment, arm: Arm, share: float, overrides: Sequence[str]) -> Config:
    """Return the configuration of an arm for a share of its rounds."""
    path, words = CONFIGS / f"{its.config}.yaml", [*its.words, *arm.words, *overrides]
    rounds = load_config(path, words).rounds
    return load_config(path, [*words, f"rounds={round(rounds * share)}"])


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


def points(lines: Lines) -> list[Point]:
    """Return every evaluation of a run."""
    found = [Point(at.rounds, at.bytes_up, at.bytes_down, at.test_accuracy) for at in curve(lines)]
    return [*found[:-1], found[-1]._replace(last_accuracy=lines[-1].get("last_accuracy", found[-1].test_accuracy))]


def known(arguments: Arguments, kept: str) -> dict[str, dict[int, Sequence[Point]]]:
    """Return the kept runs with these overrides, by title and seed."""
    return by_seed(kept_curves(arguments.into / f"{kept}.csv", arguments.overrides, Point))


def best_rate(name: str, arm: Arm, tried: Mapping[str, Mapping[int, Sequence[Point]]]) -> float:
    """Return the rate whose trial ends with the highest accuracy."""
    return max(arm.rates, key=lambda rate: tried[title(name, rate)][TRIAL_SEED][-1].test_accuracy)


def rates_table(tried: Mapping[str, Mapping[int, Sequence[Point]]]) -> str:
    """Return the course of every trial."""
    rows = []
    for name, seeds in tried.items():
        for run in seeds.values():
            accuracies = (_shown([accuracy_near(run, part)]) for part in PARTS)
            rows.append([name, *accuracies, _shown([100 * run[-1].last_accuracy])])
    return markdown_table(("options", *HEAD), rows, 1)


def arms_table(runs: Mapping[str, Mapping[int, Sequence[Point]]]) -> str:
    """Return the course of every arm at its best rate, the mean over seeds, and the difference to the first."""
    first, rows = next(iter(runs.values())), []
    for name, seeds in runs.items():
        end = next(iter(seeds.values()))[-1]
        courses = [[accuracy_near(run, part) for run in seeds.values()] for part in PARTS]
        courses.append([100 * run[-1].last_accuracy for run in seeds.values()])
        moved, shown = f"{(end.bytes_up + end.bytes_down) / 1e9:.2f}", map(_shown, courses)
        rows.append([name, end.rounds, moved, ", ".join(map(str, seeds)), *shown, difference(seeds, first)])
    return markdown_table(("options", "rounds", "GB", "seeds", *HEAD, "end minus the first"), rows, 1)


def _shown(values: Sequence[float]) -> str:
    return NOTHING if any(map(isnan, values)) else mean_and_spread(values)
