"""Studies of few uploads: which invited clients upload, as Chen, Horváth & Richtárik (TMLR 2022) compare it.

The arms are full participation, optimal draws (OCS, AOCS), and independent coins of probability m/n, all at constant
step sizes. Each method's step size is chosen for each data set as they do: on samples kept from the clients
(`data.holdout`), with the method's smallest m, on a separate seed. A grid whose best is at an edge grows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isnan, nan
from pathlib import Path
from statistics import fmean

from studies.curves import Curve, Evaluation, gigabytes, megabytes_up, one_round, spent_to, spread
from studies.picture import draw
from studies.runner import CONFIGS, Arguments, curves_of, write_summary
from train.config.schema import Config, load_config
from train.report.text import markdown_table

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
LAST = 5  # evaluations over which a step size is judged


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
        budget = "null" if self.budget is None else self.budget
        return [f"clients.sampler={SAMPLERS[self.method]}", f"clients.budget={budget}"]


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

    def cell(
        self, its: Comparison, arm: Arm, step: float, seed: int, into: Path, overrides: Sequence[str] = ()
    ) -> Config:
        """Return the configuration of one run."""
        place = f"{into}/runs/{its.name}/{arm.method.replace(' ', '-')}{arm.budget or ''}-lr{step:g}-{seed}"
        own = [*arm.overrides, f"local.lr={step}", f"seed={seed}", f"output={place}"]
        return load_config(CONFIGS / f"{self.config}.yaml", [*its.overrides, *overrides, *own])


@dataclass(frozen=True)
class Results:
    """The curves of an arm's runs at its step size, one per seed; the curve of a run that diverged ends early."""

    arm: Arm
    step: float
    rounds: int
    runs: Sequence[Curve]


Section = tuple[Comparison, list[Results]]


def run(study: Study, arguments: Arguments) -> None:
    """Run what is missing, and write the summary after each comparison."""
    sections: list[Section] = []
    steps: dict[str, float] = {}
    for its in study.comparisons:
        if not (steps and study.tuned_once):
            steps = tune(study, its, arguments, GRID)
        sections.append((its, run_arms(study, its, steps, arguments)))
        write(study, arguments, sections)


def is_whole(its: Curve, rounds: int) -> bool:
    """Return whether a run has all its rounds; the last one is always evaluated."""
    return bool(its) and its[-1].rounds == rounds


def run_arms(study: Study, its: Comparison, steps: Mapping[str, float], arguments: Arguments) -> list[Results]:
    """Run every arm on every seed at its method's step size, unless it has a curve."""
    seeds = arguments.seeds or its.seeds
    configs = {
        f"{its.name}: {arm.name}-{seed}": study.cell(
            its, arm, steps[arm.tuned], seed, arguments.into, arguments.overrides
        )
        for seed in seeds
        for arm in its.arms
    }
    found, rounds = curves_of(configs, arguments, diverging=True), next(iter(configs.values())).rounds
    runs = {arm: [found[f"{its.name}: {arm.name}-{seed}"] for seed in seeds] for arm in its.arms}
    return [Results(arm, steps[arm.tuned], rounds, courses) for arm, courses in runs.items()]


def tune(study: Study, its: Comparison, arguments: Arguments, grid: Sequence[float]) -> dict[str, float]:
    """Return the best step size of each method on the held-out samples, never at an edge of the tried values."""
    first = {arm.method: arm for arm in reversed(its.arms) if arm.method not in OTHERS_STEP}
    into, held_out = arguments.into / "tuning", [*arguments.overrides, f"data.holdout={study.holdout}"]

    def name(method: str, step: float) -> str:
        return f"{its.name}: {method}, step {step:g}"

    def score(wanted: Mapping[str, set[float]]) -> dict[str, dict[float, float]]:
        configs = {
            name(method, step): study.cell(its, first[method], step, TUNING_SEED, into, held_out)
            for method in sorted(wanted)
            for step in sorted(wanted[method])
        }
        found = curves_of(configs, arguments, "tuning/curves.csv", diverging=True)
        scores = {name: score_of(course, configs[name].rounds) for name, course in found.items()}
        return {method: {step: scores[name(method, step)] for step in steps} for method, steps in wanted.items()}

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
    found: dict[str, dict[float, float]] = {method: {} for method in methods}
    wanted = {method: set(grid) for method in methods}
    while wanted:
        for method, scores in score(wanted).items():
            found[method].update(scores)
        wanted = {method: more for method in methods if (more := _beyond(found[method])) and len(grid) > 1}
    return {method: _best(scores) for method, scores in found.items()}


def _best(scores: Mapping[float, float]) -> float:
    return max(sorted(scores), key=lambda step: scores[step])


def _beyond(scores: Mapping[float, float]) -> set[float]:
    """Return the value to try next: the neighbor of a best value at an edge."""
    best = _best(scores)
    return {2 * best} if best == max(scores) else {best / 2} if best == min(scores) else set()


def score_of(its: Curve, rounds: int) -> float:
    """Return the mean accuracy of a run's last evaluations, 0 if it diverged."""
    return fmean(at.test_accuracy for at in its[-LAST:]) if is_whole(its, rounds) else 0.0


def write(study: Study, arguments: Arguments, sections: Sequence[Section]) -> None:
    """Write the summary with one table per comparison, and the picture of the first."""
    first = sections[0][1]
    groups = {its.arm.name: its.runs for its in first}
    costs = {"rounds": one_round, "megabits sent by clients": megabits}
    picture = draw(groups, costs, study.picture, study.targets, rows=2)
    text = [study.head.format(rounds=first[0].rounds, seeds=len(first[0].runs)), LEGEND]
    text += [f"Evaluated every {first[0].runs[0][0].rounds} rounds."]
    for its, results in sections:
        heading = its.heading.format(seeds=len(results[0].runs))
        text += ["", f"## {heading}", "", table(study.targets, its.published, results)]
    write_summary(arguments, text, picture)


def table(targets: Sequence[float], published: Mapping[str, float | Fraction], results: Sequence[Results]) -> str:
    """Return a table with one row per arm."""
    percent = [f"{100 * target:g} %" for target in targets]
    columns = [column for target in percent for column in (f"rounds to {target}", "Mbit", "of full")]
    step = "step (published)" if published else "step"
    head = ("uploads", step, *columns, "last accuracy, %", "loss", "α", f"to {percent[-1]}, both ways")
    return markdown_table(head, [_row(targets, published, its, results) for its in results])


def _row(
    targets: Sequence[float], published: Mapping[str, float | Fraction], its: Results, results: Sequence[Results]
) -> list[str]:
    full = next(other for other in results if other.arm.method == FULL)
    theirs = f" ({Fraction(published[its.arm.tuned])})" if published else ""
    spent = [cell for target in targets for cell in _spent(its, full, target)]
    ends = [course[-1] for course in its.runs if is_whole(course, its.rounds)]
    last = [100 * at.test_accuracy for at in ends] + [nan] * (len(its.runs) - len(ends))
    losses, alphas = [at.train_loss for at in ends], [at.alpha for at in ends if not isnan(at.alpha)]
    scores = spread(last, missing="diverged"), spread(losses, ".3f", missing="–")
    both = spread([8000 * spent_to(course, gigabytes, targets[-1]) for course in its.runs], ",.0f")  # in Mbit
    alpha = f"{fmean(alphas):.2f}" if alphas else "–"
    return [its.arm.name, f"{Fraction(its.step)}{theirs}", *spent, *scores, alpha, both]


def _spent(its: Results, full: Results, target: float) -> tuple[str, str, str]:
    """Return rounds and bits to a target, and the share of full participation's bits, of seeds that reached it."""
    rounds, bits, its_full = (
        [spent_to(course, amount, target) for course in runs]
        for amount, runs in ((one_round, its.runs), (megabits, its.runs), (megabits, full.runs))
    )
    reached = [(mine, theirs) for mine, theirs in zip(bits, its_full, strict=True) if not isnan(mine + theirs)]
    share = f"{fmean(m for m, _ in reached) / fmean(t for _, t in reached):.2f}" if reached else "–"
    return spread(rounds, ".0f"), spread(bits, ",.0f"), share


def megabits(at: Evaluation) -> float:
    """Return the megabits that clients sent."""
    return 8 * megabytes_up(at)
