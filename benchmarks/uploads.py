"""Who of the invited clients uploads, as Chen, Horváth & Richtárik (TMLR 2022) compare it: what their studies share.

All n invited, optimal draws (OCS, AOCS), and independent coins of probability m/n, all at constant step sizes. Each
method's step size is chosen for each data set as they do: on samples kept from the clients (`data.holdout`), on a grid
that grows by one value where the best is at its edge. It is the one of the smallest m, on a seed of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isnan, nan
from pathlib import Path
from statistics import fmean

from studies import (
    Curve,
    Evaluation,
    core_hours,
    curves_of,
    draw,
    megabytes_up,
    one_round,
    spent_to,
    spread,
    write_summary,
)

from train.config import Config, load_config
from train.plots import save

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
OTHERS_STEP = {ALIKE: OPTIMAL, ADAPTIVE: OPTIMAL}  # not tuned: the step sizes of another method
LEGEND = (
    "α: improvement factor, 0 as good as full participation, 1 as uniform. Loss: the clients' own in training, last 10 "
    "rounds. Step sizes are chosen on samples kept from the clients, by one run each with the method's smallest m. "
    "Mbit are uploads; in the last column downloads are counted too: all who are invited get the model, by independent "
    "coins only those who upload."
)
LAST = 5  # evaluations that a step size is judged by


@dataclass(frozen=True)
class Arm:
    """A method with its m; full participation has none."""

    method: str
    budget: float | None = None

    @property
    def tuned(self) -> str:
        """The method whose step size it has."""
        return OTHERS_STEP.get(self.method, self.method)

    @property
    def name(self) -> str:
        """For people."""
        return self.method if self.budget is None else f"{self.method}, m = {self.budget}"

    @property
    def overrides(self) -> list[str]:
        """What makes it in a configuration."""
        budget = "null" if self.budget is None else self.budget
        return [f"clients.sampler={SAMPLERS[self.method]}", f"clients.budget={budget}"]


@dataclass(frozen=True)
class Study:
    """A data set and what is compared on it.

    Attributes:
        name: of its folder.
        config: the configuration file.
        overrides: that make the data set of it.
        arms: what is compared; of each method the one with the smallest m is tuned.
        targets: test accuracies, in 0…1.
        holdout: training samples to tune on.
    """

    name: str
    config: Path
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    targets: tuple[float, ...]
    holdout: int
    published: Mapping[str, float | Fraction] = field(default_factory=dict)  # method -> step size


@dataclass(frozen=True)
class Results:
    """The curves of an arm's runs at its step size, one a seed; that of one that diverged ends before all rounds."""

    arm: Arm
    step: float
    rounds: int
    runs: list[Curve]

    @property
    def sound(self) -> list[Curve]:
        """The runs that have all rounds."""
        return [its for its in self.runs if is_whole(its, self.rounds)]


def is_whole(its: Curve, rounds: int) -> bool:
    """Return whether a run has all its rounds, the last of which is evaluated."""
    return bool(its) and its[-1].rounds == rounds


def run_arms(
    study: Study, steps: Mapping[str, float], seeds: Sequence[int], into: Path, overrides: Sequence[str]
) -> list[Results]:
    """Run every arm on every seed at its method's step size; what is there already is not run again."""
    cells = {
        (arm, seed): _cell(study, arm, steps[arm.tuned], seed, into, overrides) for seed in seeds for arm in study.arms
    }
    configs = {f"{study.name}: {arm.name}-{seed}": config for (arm, seed), config in cells.items()}
    found = dict(zip(cells, curves_of(configs, into / "curves.csv", overrides, diverging=True).values(), strict=True))
    rounds = next(iter(cells.values())).rounds
    return [Results(arm, steps[arm.tuned], rounds, [found[arm, seed] for seed in seeds]) for arm in study.arms]


def tune(study: Study, into: Path, overrides: Sequence[str], grid: Sequence[float]) -> dict[str, float]:
    """Return the step size of each method: the best on the held-out samples, never at an edge of what was tried."""
    first = {arm.method: arm for arm in reversed(study.arms) if arm.method not in OTHERS_STEP}
    holdout = f"data.holdout={study.holdout}"

    def score(wanted: Mapping[str, set[float]]) -> dict[str, dict[float, float]]:
        pairs = [(method, step) for method in sorted(wanted) for step in sorted(wanted[method])]
        configs = {
            f"{study.name}: {method}, step {step:g}": _cell(
                study, first[method], step, TUNING_SEED, into / "tuning", [*overrides, holdout]
            )
            for method, step in pairs
        }
        runs = curves_of(configs, into / "tuning" / "curves.csv", overrides, diverging=True)
        scores = [score_of(its, configs[name].rounds) for name, its in runs.items()]
        found: dict[str, dict[float, float]] = {method: {} for method in wanted}
        for (method, step), value in zip(pairs, scores, strict=True):
            found[method][step] = value
        return found

    return search(sorted(first), grid, score)


def search(
    methods: Sequence[str],
    grid: Sequence[float],
    score: Callable[[Mapping[str, set[float]]], Mapping[str, Mapping[float, float]]],
) -> dict[str, float]:
    """Return each method's best step size; a grid whose best is at an edge grows there, by a factor of two.

    Args:
        methods: to tune.
        grid: to begin with.
        score: step sizes to try, by method -> the score of each, the higher the better; of equal ones the smaller wins.
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
    """Return the value to try next: the neighbor of a best one at an edge."""
    best = _best(scores)
    return {2 * best} if best == max(scores) else {best / 2} if best == min(scores) else set()


def score_of(its: Curve, rounds: int) -> float:
    """Return the mean accuracy of a run's last evaluations, 0 where it diverged before it had all rounds."""
    return fmean(at.test_accuracy for at in its[-LAST:]) if is_whole(its, rounds) else 0.0


def write(
    into: Path,
    script: str,
    overrides: Sequence[str],
    head: Sequence[str],
    sections: Mapping[str, tuple[Study, Sequence[Results]]],
    picture: str,
) -> None:
    """Write the summary with a table a section, and the picture of the first section, of this title."""
    study, first = next(iter(sections.values()))
    plot(first, picture, study.targets, into / f"{script}.png")
    every = f"Evaluated every {first[0].runs[0][0].rounds} rounds. With the search for step sizes"
    text = [*head, LEGEND, f"{every} {core_hours(into.rglob('curves.csv'))}"]
    for heading, (study, results) in sections.items():
        text += ["", f"## {heading}", "", *table(study, results)]
    write_summary(into, script, overrides, text, picture)


def table(study: Study, results: Sequence[Results]) -> list[str]:
    """Return the lines of a table: a row an arm."""
    targets = [f"rounds to {100 * target:g} % | Mbit | of full" for target in study.targets]
    step = "step (published)" if study.published else "step"
    head = ("uploads", step, *targets, "last accuracy, %", "loss", "α", f"to {100 * study.targets[-1]:g} %, both ways")
    rows = [_row(study, its, results) for its in results]
    rule = "|---|" + "---:|" * (len(rows[0]) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def _row(study: Study, its: Results, results: Sequence[Results]) -> list[str]:
    full = next(other for other in results if other.arm.method == FULL)
    published = f" ({Fraction(study.published[its.arm.tuned])})" if study.published else ""
    cells = [its.arm.name, f"{Fraction(its.step)}{published}"]
    for target in study.targets:
        rounds, bits, its_full = (
            [spent_to(course, target, amount) for course in runs]
            for amount, runs in ((one_round, its.runs), (megabits, its.runs), (megabits, full.runs))
        )
        reached = [(mine, theirs) for mine, theirs in zip(bits, its_full, strict=True) if not isnan(mine + theirs)]
        share = f"{fmean(m for m, _ in reached) / fmean(t for _, t in reached):.2f}" if reached else "–"
        cells += [spread(rounds, ".0f"), spread(bits, ",.0f"), share]
    ends = [course[-1] for course in its.sound]
    last = [100 * at.test_accuracy for at in ends] + [nan] * (len(its.runs) - len(ends))
    losses, alphas = [at.train_loss for at in ends], [at.alpha for at in ends if not isnan(at.alpha)]
    scores = spread(last, missing="diverged"), spread(losses, ".3f", missing="–")
    both = spread([spent_to(course, study.targets[-1], megabits_both_ways) for course in its.runs], ",.0f")
    return [*cells, *scores, f"{fmean(alphas):.2f}" if alphas else "–", both]


def plot(results: Sequence[Results], title: str, targets: Sequence[float], path: Path) -> None:
    """Draw test accuracy and training loss against rounds and bits, a look an arm."""
    bits = "megabits sent by clients"
    groups = {its.arm.name: its.runs for its in results}
    save(draw(groups, {"rounds": one_round, bits: megabits}, title, targets, [bits], rows=2), path)


def megabits(at: Evaluation) -> float:
    """What the clients have sent to the server."""
    return 8 * megabytes_up(at)


def megabits_both_ways(at: Evaluation) -> float:
    """What the clients have sent to the server and been sent by it."""
    return 8 * (at.bytes_up + at.bytes_down) / 1e6


def _cell(study: Study, arm: Arm, step: float, seed: int, into: Path, overrides: Sequence[str]) -> Config:
    place = f"{into}/runs/{study.name}/{arm.method.replace(' ', '-')}{arm.budget or ''}-lr{step:g}-{seed}"
    own = [*arm.overrides, f"local.lr={step}", f"seed={seed}", f"output={place}"]
    return load_config(study.config, [*study.overrides, *overrides, *own])
