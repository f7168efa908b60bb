"""Simulated seconds to a loss and to an accuracy on a shared wireless channel: Setups 1 and 3 of Luo et al., on MNIST.

Luo et al. 2024 (arXiv 2404.13804). Setup 3 (configs/wireless_mnist.yaml) has their clients, steps, targets and pilots'
losses; in Setup 1 (configs/wireless_logistic.yaml) MNIST stands in for EMNIST, with targets of its own. As published:
one world, and runs that differ in draws and batches, the same seeds for every scheme. Three pilots with uniform draws
(q = 1/N) and three with weighted ones are run once. They give β/α (Eq. 35), and G, the largest ‖U‖/η of each client in
a uniform pilot, mean of the pilots: to the proposed draws, to those with β/α = 0 (Eq. 38), and to the statistical ones.
A run ends when it has reached both targets; schemes with short rounds may take more of them. What has a curve in
WHERE/curves.csv is not run again. On two cores all of Setup 1 takes ten minutes, each seed of Setup 3 half an hour.

    python benchmarks/wireless_mnist.py results/wireless_mnist --setup 3 [--seeds 5] [--jobs 2] [--quick] [rounds=400]
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from arguments import parser_of
from arrivals import EQ8, SCALED, SCHEMES, Course, Published, bands_of, figure, main_table, pilot_table
from studies import Curve, cells, core_hours, curves_of, to_run, write_summary

from train.config import Config
from train.files import write_whole
from train.pilots import Lesson
from train.plots import save
from train.records import PILOTS_FILE

CONFIGS = Path(__file__).parents[1] / "configs"
NO_PILOTS = ("clients.beta_over_alpha=null", "clients.pilot_losses=[]")
TAUGHT = {
    "proposed": (),
    "Eq. 38": ("clients.beta_over_alpha=0",),
    "statistical": ("clients.sampler=statistical", "clients.beta_over_alpha=null"),
}
OTHERS = {
    "weighted": ("clients.sampler=weighted", "clients.replacement=true", *NO_PILOTS),
    SCALED: ("clients.sampler=uniform_scaled", *NO_PILOTS),
    EQ8: ("clients.sampler=uniform", "clients.replacement=true", *NO_PILOTS),
}
QUICK = (
    *("data.name=digits", "data.partition_options={samples: 600, classes: [1, 6]}", "clients.count=20"),
    *("clients.per_round=4", "local.steps=5", "local.batch_size=8", "local.lr=0.3", "clients.pilot_losses=[2.2, 2.1]"),
    *("rounds=8", "evaluate_every=2", "target_loss=2.0", "target_accuracy=0.4"),
)


@dataclass(frozen=True)
class Setup:
    """A published setup: its configuration, how many seeds are run, and Tables II and III.

    `longer` has the rounds of schemes that need more than the configuration's for the same simulated seconds.
    """

    config: str
    seeds: int
    seconds: Published
    rounds: Mapping[str, Sequence[int]]
    ratio: float
    remark: str
    longer: Mapping[str, int] = field(default_factory=dict)

    def rounds_of(self, schemes: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return the overrides of each scheme with its own limit of rounds, where it has one."""
        limits = {name: (f"rounds={rounds}",) for name, rounds in self.longer.items()}
        return {name: (*own, *limits.get(name, ())) for name, own in schemes.items()}


SETUPS = {
    1: Setup(
        "wireless_logistic",
        20,
        {
            "proposed": (2428.7, 707.3),
            "statistical": (3958.3, 302.4),
            "weighted": (3477.4, 334.2),
            SCALED: (8487.4, 528.8),
        },
        {"uniform": (39, 47, 58, 79, 132), "weighted": (12, 19, 27, 36, 56)},
        11.51,
        "MNIST stands in for EMNIST's lower-case letters (10 classes for 26). It reaches the published targets, loss "
        "1.16 and 70 %, in one to four rounds, hence others; the published seconds are to those, the published rounds "
        "of pilots to the same multiples of them. Steps are 0.0125/(1 + round) on standardized images, which is the "
        "published 0.1 on pixels of 0 to 1.",
    ),
    3: Setup(
        "wireless_mnist",
        5,
        {
            "proposed": (2453.7, 1289.2),
            "statistical": (3295.0, 878.3),
            "weighted": (4548.6, 1530.2),
            SCALED: None,
        },
        {"uniform": (46, 48, 51, 55, 59), "weighted": (27, 28, 30, 32, 34)},
        4.92,
        "LeNet-5 starts from random weights: from the paper's w = 0 it would have no gradient. All have the 4,000 "
        "simulated seconds within which the paper's uniform draws do not arrive. The paper has 20 runs.",
        {"proposed": 1000, "Eq. 38": 600},
    ),
}


@dataclass(frozen=True)
class Training(Course):
    """What a run of `train` came to."""

    rounds: list[int]
    seconds: list[float]
    losses: list[float]
    accuracies: list[float]

    @classmethod
    def of(cls, curve: Curve) -> Self:
        """Return what a run's curve says."""
        return cls(
            [at.rounds for at in curve],
            [at.simulated for at in curve],
            [at.train_set_loss for at in curve],
            [at.test_accuracy for at in curve],
        )


def run_schemes(
    taught: Mapping[str, Config], others: Mapping[str, Config], into: Path, asked: Sequence[str], jobs: int | None
) -> tuple[dict[str, Curve], Lesson]:
    """Run what is missing: the pilots within the first of those they teach, which hands them on to the others."""
    name, first = next(iter(taught.items()))
    kept, lesson = into / "curves.csv", into / PILOTS_FILE
    curves = curves_of({name: first} | others, kept, asked, jobs)
    if (path := first.directory / PILOTS_FILE).exists():
        write_whole(lesson, path.read_bytes())
    for config in to_run(taught, kept, asked).values():
        if not (path := config.directory / PILOTS_FILE).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lesson.read_bytes())
    return curves | curves_of(taught, kept, asked, jobs), Lesson(**json.loads(lesson.read_bytes()))


def write_runs(path: Path, courses: Mapping[str, Sequence[Course]], loss: float, accuracy: float) -> None:
    """Write a row a run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        ends = (f"rounds_to_loss_{loss:g}", f"seconds_to_loss_{loss:g}", f"seconds_to_{accuracy:g}")
        writer.writerow(("scheme", "seed", "rounds", *ends, "last_loss", "last_accuracy"))
        for scheme, its in courses.items():
            for seed, course in enumerate(its):
                spent = course.rounds_to(loss), course.seconds_to(loss), course.seconds_to(accuracy=accuracy)
                cells = ("" if value is None else f"{value:.0f}" for value in spent)
                last = f"{course.losses[-1]:.4f}", f"{course.accuracies[-1]:.4f}"
                writer.writerow((scheme, seed, course.rounds[-1], *cells, *last))


def summary(number: int, config: Config, courses: Mapping[str, Sequence[Course]], lesson: Lesson) -> list[str]:
    """Return the tables of a setup; `config` is that of a taught run with no limit of its own."""
    setup, clients = SETUPS[number], config.clients
    longer = ", ".join(f"{rounds:,} by {scheme}" for scheme, rounds in setup.longer.items())
    return [
        f"# Setup {number}: seconds to loss {config.target_loss}, N = {clients.count}, K = {clients.per_round}",
        "",
        setup.remark,
        f"One world, {len(courses['proposed'])} runs that differ in draws and batches; mean ± sd of those that arrived "
        f"within {config.rounds} rounds{f' ({longer})' if longer else ''}, evaluated every {config.evaluate_every}.",
        "",
        *main_table(courses, config.target_loss, config.target_accuracy, setup.seconds),
        "",
        "Rounds of the pilots, by the mean loss of three runs each, and the β/α that follows at each loss. Their mean,",
        f"{lesson.beta_over_alpha:.3g}, is used. G is a client's largest ‖U‖/η, U being all of its steps; that of the",
        f"paper is of one step, so that its β/α, {setup.ratio:g} (under the name α/β), has another unit.",
        "",
        *pilot_table(lesson, clients.pilot_losses, setup.rounds),
    ]


def main(into: Path, number: int, asked: Sequence[str], quick: bool, seeds: int | None, jobs: int | None) -> None:
    """Run what is missing of a setup, and write."""
    into.mkdir(parents=True, exist_ok=True)
    setup, overrides = SETUPS[number], [*(QUICK if quick else ()), *asked]
    count, path = seeds or (2 if quick else setup.seeds), CONFIGS / f"{setup.config}.yaml"
    both = (TAUGHT, OTHERS) if quick else (setup.rounds_of(TAUGHT), OTHERS)
    taught, others = (cells(path, schemes, range(count), into, overrides) for schemes in both)
    runs, lesson = run_schemes(taught, others, into, overrides, jobs)
    config = taught["statistical-0"]  # with pilots, and no limit of its own
    courses = {scheme: [Training.of(runs[f"{scheme}-{seed}"]) for seed in range(count)] for scheme in SCHEMES}
    write_runs(into / "runs.csv", courses, config.target_loss, config.target_accuracy)
    title = f"Setup {number}: loss and accuracy against simulated seconds"
    save(figure(bands_of(courses), config.target_loss, config.target_accuracy, title), into / "wireless_mnist.png")
    told = [f"--setup={number}", *([f"--seeds={seeds}"] if seeds else []), *(["--quick"] if quick else []), *asked]
    text = summary(number, config, courses, lesson)
    text += ["", f"Without the pilots {core_hours([into / 'curves.csv'])}"]
    write_summary(into, "wireless_mnist", told, text, title)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--setup", type=int, choices=SETUPS, required=True)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
    parser.add_argument("--seeds", type=int, help="only so many; the others can be run later")
    parser.add_argument("--jobs", type=int, help="runs at a time; one a core if not given")
    args = parser.parse_args()
    main(args.into, args.setup, args.overrides, args.quick, args.seeds, args.jobs)
