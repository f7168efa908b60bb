"""Studies of few uploads: which invited clients upload, as Chen, Horváth & Richtárik (TMLR 2022) compare it.

The arms are full participation, optimal draws (OCS, AOCS), and independent coins of probability m/n, all at constant
step sizes. Each method's step size is chosen for each data set as they do: on samples kept from the clients
(`data.holdout`), with the method's smallest m, on a separate seed. A grid whose best is at an edge grows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pandas as pd

from studies.curves import by_scheme, costs_to, ends, spread
from studies.picture import draw
from studies.runner import CONFIGS, Arguments, curves_of, write_summary
from train.config.schema import Config, load_config
from train.report.text import NOTHING, frame_table

GRID = (2.0**-5, 2.0**-4, 2.0**-3, 2.0**-2, 2.0**-1)
TUNING_SEED, SEEDS = 1000, (0, 1, 2, 3, 4)
FULL, OPTIMAL, ADAPTIVE, PRICED, UNIFORM = "full", "OCS", "AOCS", "OCS by bytes", "uniform"
ALIKE = "full at the step of OCS"
SAMPLERS = {
    FULL: "uniform",
    ALIKE: "uniform",
    OPTIMAL: "ocs",
    ADAPTIVE: "aocs",
    PRICED: "ocs_partial",
    UNIFORM: "uniform_upload",
}
OTHERS_STEP = {ALIKE: OPTIMAL, ADAPTIVE: OPTIMAL}  # not tuned: they use the step size of another method
LEGEND = (
    "α is the improvement factor: 0 is as good as full participation, 1 as uniform. The loss is the clients' in "
    "training, over the last 10 rounds. Step sizes are chosen on samples kept from the clients, by one run each with "
    "the method's smallest m. Mbit are uploads; the last column adds downloads. All invited clients get the model, but "
    "with independent coins only those that upload."
)
LAST_EVALUATIONS = 5  # over which a step size is judged


@dataclass(frozen=True)
class Arm:
    """A method with its m; full participation has none."""

    method: str
    budget: float | None = None

    @property
    def tuned(self) -> str:
        """The method whose step size it uses."""
        return OTHERS_STEP.get(self.method, self.method)

    @property
    def name(self) -> str:
        """The name shown in tables."""
        return self.method if self.budget is None else f"{self.method}, m = {self.budget}"

    @property
    def overrides(self) -> list[str]:
        """The keys of a configuration that select it."""
        budget = [] if self.budget is None else [f"clients.sampler.budget={self.budget}"]
        return [f"clients.sampler={SAMPLERS[self.method]}", *budget]


@dataclass(frozen=True)
class Comparison:
    """A data set and the arms compared on it: one table of the study.

    Attributes:
        name: the name of its folder and curves.
        heading: the heading of its table; ``{seeds}`` stands for their number.
        arms: the compared arms; of each method the one with the smallest m is tuned.
        overrides: keys that make the data set.
        seeds: one run each.
        published: the published step size of each method.
    """

    name: str
    heading: str
    arms: tuple[Arm, ...]
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    published: Mapping[str, float | Fraction] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Comparisons with one configuration.

    Attributes:
        config: the stem of its file in configs/.
        head: title and remarks; ``{rounds}`` and ``{seeds}`` stand for those of the first comparison.
        picture: the title of the first comparison's picture.
        comparisons: one table each.
        targets: target test accuracies, in 0…1.
        holdout: training samples to tune on.
        tuned_once: whether all comparisons use the step sizes of the first.
    """

    config: str
    head: str
    picture: str
    comparisons: tuple[Comparison, ...]
    targets: tuple[float, ...]
    holdout: int
    tuned_once: bool = False

    def config_of(
        self, comparison: Comparison, arm: Arm, step: float, seed: int, into: Path, overrides: Sequence[str] = ()
    ) -> Config:
        """Return the configuration of one run."""
        output = f"{into}/runs/{comparison.name}/{arm.method.replace(' ', '-')}{arm.budget or ''}-lr{step:g}-{seed}"
        words = [*arm.overrides, f"local.optimizer.lr={step}", f"seed={seed}", f"output={output}"]
        return load_config(CONFIGS / f"{self.config}.yaml", [*comparison.overrides, *overrides, *words])


@dataclass(frozen=True)
class Results:
    """The runs of an arm at its step size.

    Attributes:
        arm: the arm.
        step: its step size.
        rounds: of a run that does not diverge.
        seeds: one run each.
        curves: of the runs, with their `seed` and `bytes_total`; the curve of a run that diverged ends early.
    """

    arm: Arm
    step: float
    rounds: int
    seeds: Sequence[int]
    curves: pd.DataFrame

    @property
    def ends(self) -> pd.DataFrame:
        """The last evaluations of the runs that did not diverge, by seed."""
        last = ends(self.curves).set_index("seed")
        return last[last.rounds == self.rounds]  # the last round is always evaluated

    def costs(self, target: float, cost: str) -> pd.Series:
        """Return the cost of each seed until it first reached a test accuracy."""
        return costs_to(self.curves, self.curves.test_accuracy >= target, cost, self.seeds)


Section = tuple[Comparison, list[Results]]


def run(study: Study, arguments: Arguments) -> None:
    """Run what is missing, and write the summary after each comparison."""
    sections: list[Section] = []
    for section in run_comparisons(study, arguments):
        sections.append(section)
        write(study, arguments, sections)


def run_comparisons(study: Study, arguments: Arguments) -> Iterator[Section]:
    """Run what is missing, and yield each comparison with its results."""
    steps: dict[str, float] = {}
    for comparison in study.comparisons:
        if not (steps and study.tuned_once):
            steps = tune(study, comparison, arguments, GRID)
        yield comparison, run_arms(study, comparison, steps, arguments)


def run_arms(study: Study, comparison: Comparison, steps: Mapping[str, float], arguments: Arguments) -> list[Results]:
    """Run every arm on every seed at its method's step size, unless it has a curve."""
    seeds, into = arguments.seeds or comparison.seeds, arguments.into
    configs = {
        f"{comparison.name}: {arm.name}-{seed}": study.config_of(
            comparison, arm, steps[arm.tuned], seed, into, arguments.overrides
        )
        for seed in seeds
        for arm in comparison.arms
    }
    curves, rounds = by_scheme(curves_of(configs, arguments, diverging=True)), next(iter(configs.values())).rounds
    return [
        Results(arm, steps[arm.tuned], rounds, seeds, curves[curves.scheme == f"{comparison.name}: {arm.name}"])
        for arm in comparison.arms
    ]


def tune(study: Study, comparison: Comparison, arguments: Arguments, grid: Sequence[float]) -> dict[str, float]:
    """Return the best step size of each method on the held-out samples, never at an edge of the tried values."""
    first = {arm.method: arm for arm in reversed(comparison.arms) if arm.method not in OTHERS_STEP}
    into, overrides = arguments.into / "tuning", [*arguments.overrides, f"data.holdout={study.holdout}"]

    def name(method: str, step: float) -> str:
        return f"{comparison.name}: {method}, step {step:g}"

    def score(steps_to_try: Mapping[str, set[float]]) -> dict[str, dict[float, float]]:
        configs = {
            name(method, step): study.config_of(comparison, first[method], step, TUNING_SEED, into, overrides)
            for method in sorted(steps_to_try)
            for step in sorted(steps_to_try[method])
        }
        curves = curves_of(configs, arguments, "tuning/curves.csv", diverging=True)
        scores = {name: score_of(curves[curves.run == name], config.rounds) for name, config in configs.items()}
        return {method: {step: scores[name(method, step)] for step in steps} for method, steps in steps_to_try.items()}

    return search(sorted(first), grid, score)


def search(
    methods: Sequence[str],
    grid: Sequence[float],
    score: Callable[[Mapping[str, set[float]]], Mapping[str, Mapping[float, float]]],
) -> dict[str, float]:
    """Return each method's best step size; a grid whose best is at an edge grows there, by a factor of two.

    Args:
        methods: the methods to tune.
        grid: the first step sizes to try.
        score: maps the step sizes to try, by method, to their scores. The highest score wins; of equal ones, the
            smaller step size.
    """
    tried: dict[str, dict[float, float]] = {method: {} for method in methods}
    untried = {method: set(grid) for method in methods}
    while untried:
        for method, scores in score(untried).items():
            tried[method].update(scores)
        untried = {method: steps for method in methods if (steps := _beyond(tried[method])) and len(grid) > 1}
    return {method: _best(scores) for method, scores in tried.items()}


def _best(scores: Mapping[float, float]) -> float:
    return max(sorted(scores), key=lambda step: scores[step])


def _beyond(scores: Mapping[float, float]) -> set[float]:
    """Return the value to try next: the neighbor of a best value at an edge."""
    best = _best(scores)
    return {2 * best} if best == max(scores) else {best / 2} if best == min(scores) else set()


def score_of(curve: pd.DataFrame, rounds: int) -> float:
    """Return the mean accuracy of a run's last evaluations, 0 if it diverged."""
    finished = len(curve) and curve.rounds.iloc[-1] == rounds
    return float(curve.test_accuracy.tail(LAST_EVALUATIONS).mean()) if finished else 0.0


def write(study: Study, arguments: Arguments, sections: Sequence[Section]) -> None:
    """Write the table of every comparison so far, and the picture of the first."""
    first = sections[0][1]
    drawn = pd.concat([results.curves.assign(scheme=results.arm.name) for results in first])
    costs = {"rounds": "rounds", "megabits sent by clients": "megabits"}
    picture = draw(drawn.assign(megabits=8e-6 * drawn.bytes_up), costs, study.picture, study.targets, rows=2)
    text = [study.head.format(rounds=first[0].rounds, seeds=len(first[0].seeds)), LEGEND]
    text += [f"Evaluated every {first[0].curves.rounds.iloc[0]} rounds."]
    for comparison, results in sections:
        heading = comparison.heading.format(seeds=len(results[0].seeds))
        text += ["", f"## {heading}", "", frame_table(table(study.targets, comparison.published, results))]
    write_summary(arguments, text, picture)


def table(
    targets: Sequence[float], published: Mapping[str, float | Fraction], results: Sequence[Results]
) -> pd.DataFrame:
    """Return one row per arm."""
    full = next(each for each in results if each.arm.method == FULL)
    return pd.DataFrame([_row(targets, published, each, full) for each in results])


def _row(
    targets: Sequence[float], published: Mapping[str, float | Fraction], results: Results, full: Results
) -> dict[str, str]:
    published_step = f" ({Fraction(published[results.arm.tuned])})" if published else ""
    row = {
        "uploads": results.arm.name,
        f"step{' (published)' * bool(published)}": f"{Fraction(results.step)}{published_step}",
    }
    for target in targets:
        bits, bits_of_full = (8e-6 * each.costs(target, "bytes_up") for each in (results, full))
        reached = bits.notna() & bits_of_full.notna()  # seeds that reached it
        share = f"{bits[reached].mean() / bits_of_full[reached].mean():.2f}" if any(reached) else NOTHING
        row |= {
            f"rounds to {100 * target:g} %": spread(results.costs(target, "rounds"), ".0f"),
            f"Mbit to {100 * target:g} %": spread(bits, ",.0f"),
            f"of full, {100 * target:g} %": share,
        }
    last, alphas = results.ends, results.ends.alpha.dropna()
    return row | {
        "last accuracy, %": spread(100 * last.test_accuracy.reindex(results.seeds), missing="diverged"),
        "loss": spread(last.train_loss, ".3f", missing=NOTHING),
        "α": f"{alphas.mean():.2f}" if len(alphas) else NOTHING,
        f"to {100 * targets[-1]:g} %, both ways": spread(8e-6 * results.costs(targets[-1], "bytes_total"), ",.0f"),
    }
